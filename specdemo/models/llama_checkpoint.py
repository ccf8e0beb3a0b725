"""Reader for Llama checkpoints in the current format of `transformers`, whose modelling files take 2 s to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdemo.core.events import Loading, ReportProgress, ignore_progress
from specdemo.models.engines.native import uses_native_engine
from specdemo.models.engines.native_matrix import FLOAT_FORMATS
from specdemo.models.hub import Hub, local_shapes
from specdemo.models.spec import QUANTIZATIONS, SPREAD, ModelSpec, find_device, is_gguf
from specdemo.models.tokenizer import open_tokenizer
from specdemo.models.untrusted import read_settings, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Model
else:
    _Model = nn.Module  # the module of `PreTrainedModel` takes 2 s to import

_FLOATS = ("F64", "F32", "BF16", "F16")
_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
_VALUES = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
_KEYS = {*_SIZES, "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"}


class LlamaConfig(PretrainedConfig):
    """Configuration of a checkpoint as stored."""

    model_type = "llama"


def read_config(spec: ModelSpec, hub: Hub, report: ReportProgress = ignore_progress) -> LlamaConfig | None:
    """Return the configuration of a resolved spec, or `None` if the model needs `transformers`."""
    if QUANTIZATIONS[spec.quantization].bits or spec.device == SPREAD or is_gguf(spec.name):
        return None
    folder = hub.settings(spec.name, spec.revision, report)
    stored = read_settings(spec.name, folder / "config.json")
    path = folder / "tokenizer_config.json"
    tokenizer = read_settings(spec.name, path) if path.exists() else {}
    rope = stored.get("rope_parameters")
    if (
        any(stored.get(name) != value for name, value in _VALUES.items())
        or not stored.keys() >= _KEYS
        or not all(isinstance(stored[name], int) for name in _SIZES)
        or "quantization_config" in stored
        or not (isinstance(rope, dict) and rope.get("rope_type") == "default" and "rope_theta" in rope)
        or tokenizer.get("tokenizer_class") not in _TOKENIZERS
    ):
        return None
    return LlamaConfig.from_dict(stored)


def read_checkpoint(
    spec: ModelSpec, hub: Hub, report: ReportProgress = ignore_progress
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase] | None:
    """Load a resolved spec, or return `None` if it needs `transformers` or has other tensors than configured."""
    config = read_config(spec, hub, report)
    if config is None:
        return None
    folder = hub.weights(spec.name, spec.revision, report)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    has_settings = (folder / "generation_config.json").exists()
    settings = GenerationConfig.from_pretrained(folder) if has_settings else GenerationConfig.from_model_config(config)
    model.generation_config = settings
    wanted, device = dict(model.named_parameters()), find_device(spec.device)
    stored = {name: shape for name, (dtype, shape) in local_shapes(spec.name, folder).items() if dtype in _FLOATS}
    if stored != {name: tuple(weight.shape) for name, weight in wanted.items()}:
        return None
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name in wanted]
            for i, name in enumerate(names, 1):
                tensors[name] = file.get_tensor(name)
                report(Loading(f"reading {spec.title}, weight {i:,} of {len(names):,}", i, len(names)))
    dtype = matrix_dtype = getattr(torch, spec.dtype)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.dim() > 1}
    if uses_native_engine(device) and dtype == torch.float32 and len(dtypes) == 1 and dtypes <= FLOAT_FORMATS.keys():
        (matrix_dtype,) = dtypes  # the native engine computes with stored formats
    weights = {name: tensor.to(device, matrix_dtype if tensor.dim() > 1 else dtype) for name, tensor in tensors.items()}
    model.load_state_dict(weights, strict=False, assign=True)  # a tied head is no separate tensor
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.train(False).requires_grad_(False)
    return model, open_tokenizer(spec.name, folder, PreTrainedTokenizerFast)


class _Norm(nn.Module):
    def __init__(self, size: int, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.variance_epsilon = config.rms_norm_eps


def matrix_shapes(width: int, inner: int, queries: int, keys: int) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of the matrices of a layer."""
    return {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }


def _layer(config: LlamaConfig) -> nn.Module:
    layer, attention = nn.Module(), nn.Module()
    layer.self_attn, layer.mlp = attention, nn.Module()
    biased = getattr(config, "biased", ())
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes = matrix_shapes(config.hidden_size, config.intermediate_size, queries, keys)
    for path, (outputs, inputs) in shapes.items():
        part, _, name = path.partition(".")
        linear = nn.Linear(inputs, outputs, bias=name.removesuffix("_proj") in biased)
        layer.get_submodule(part).add_module(name, linear)
    if getattr(config, "normed_heads", False):
        attention.q_norm, attention.k_norm = _Norm(config.head_dim, config), _Norm(config.head_dim, config)
    layer.input_layernorm = _Norm(config.hidden_size, config)
    layer.post_attention_layernorm = _Norm(config.hidden_size, config)
    return layer


class LlamaForCausalLM(_Model):
    """Weights under the names of `transformers`, without a forward pass."""

    model: Any
    _keep_in_fp32_modules = None
    note = ""  # formats of the weights of a GGUF file
    activations = "16"  # bits of the inputs of its quantised weights

    def __init__(self, config: LlamaConfig) -> None:
        nn.Module.__init__(self)
        self.config, self.generation_config = config, GenerationConfig()
        empty = torch.empty(config.vocab_size, config.hidden_size)  # initialising it would load the compiler
        body: Any = nn.Module()
        self.model = body
        body.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=empty)
        body.layers = nn.ModuleList(_layer(config) for _ in range(config.num_hidden_layers))
        body.norm = _Norm(config.hidden_size, config)
        body.rotary_emb = rotary_angles(config.head_dim, config.rope_parameters["rope_theta"])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = body.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.norm.weight.dtype  # matrices may be stored in another
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.norm.weight.device
        return device

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


def rotary_angles(
    dim: int, theta: float, factors: Tensor | float = 1.0
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the function from positions `[1, n]` to cosines and sines `[1, n, dim]` (RoPE, 2104.09864)."""

    @torch.no_grad()
    def angles(rows: Tensor, token_positions: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, dim, 2, dtype=torch.int64).to(rows.device, torch.float)
        frequencies = 1.0 / theta ** (steps / dim) / factors
        half = token_positions[..., None].float() * frequencies
        full = torch.cat((half, half), dim=-1)
        return full.cos().to(rows.dtype), full.sin().to(rows.dtype)

    return angles
