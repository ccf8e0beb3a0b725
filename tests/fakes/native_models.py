"""Small random models of the native engine: all families, number formats, quantised and stored forms."""

import random
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import bitsandbytes as bnb
import gguf
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.pytorch_utils import Conv1D

from fakes.gguf_models import quantize
from specdemo.core.step import Draft
from specdemo.models.engines.engine import Engine, Entry
from specdemo.models.engines.gguf_linear import GgufLinear, dequantised
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.native.interface import QUANTISED_GGUF

VOCAB, CONTEXT = 301, 2100
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
}
ODD = {"hidden_size": 60, "intermediate_size": 37, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 18}
ODD_GPT2 = {"hidden_size": 54, "num_attention_heads": 3, "activation_function": "gelu", "tie_word_embeddings": False}
ODD_NEOX = {"hidden_size": 54, "intermediate_size": 37, "num_attention_heads": 3, "tie_word_embeddings": True}
GEMMA = {
    "sliding_window": 5,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 8.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "odd widths": LlamaConfig(**{**SMALL, **ODD}),
    "biases": LlamaConfig(**{**SMALL, **ODD}, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "wide heads": LlamaConfig(**{**SMALL, "head_dim": 80}),
    "yarn": LlamaConfig(**SMALL, rope_parameters=YARN),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "mistral windows": MistralConfig(**SMALL, sliding_window=5),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2 windows": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**{**SMALL, "head_dim": 24}),
    "gelu": LlamaConfig(**SMALL, hidden_act="gelu_pytorch_tanh"),
    "gpt2": GPT2Config(**{**SMALL, "n_positions": CONTEXT}, activation_function="gelu_new"),
    "gpt2 odd": GPT2Config(**{**SMALL, **ODD_GPT2}, n_inner=37, scale_attn_by_inverse_layer_idx=True),
    "gpt neox": GPTNeoXConfig(**SMALL),
    "gpt neox odd": GPTNeoXConfig(**{**SMALL, **ODD_NEOX}, rotary_pct=0.34, use_parallel_residual=False),
    "gemma2": Gemma2Config(**{**SMALL, **GEMMA, "head_dim": 16}),
    "gemma2 odd": Gemma2Config(**{**SMALL, **ODD, **GEMMA, "tie_word_embeddings": False}, attention_bias=True),
}
FAMILIES = ("gpt2", "gpt neox", "gemma2")
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = ("int8", "nf4")
MIXED = "Q4_K and Q6_K"
NARROW = {f"{form}, 8 bits": form for form in (*QUANTISED_GGUF, MIXED)}  # forms with activations of 8 bits


def config_of(name: str, form: str) -> PretrainedConfig:
    """Blocks of Q4_K and Q6_K have 256 inputs."""
    changes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if form.endswith("_K") else {}
    return type(CONFIGS[name])(**{**CONFIGS[name].to_dict(), **changes})


def random_model(config: PretrainedConfig, dtype: str = "float32") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config)).to(getattr(torch, dtype)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # gains and biases
            parameter.add_(torch.randn(parameter.shape) / 4)
    return model


def quantized(form: str, model: Any) -> Any:
    """Replace the linear layers except the head by layers of bitsandbytes."""
    for parent in list(model.base_model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear and not isinstance(linear, Conv1D):
                continue
            values = linear.state_dict()
            if isinstance(linear, Conv1D):
                values["weight"] = values["weight"].T.contiguous()
            outputs, inputs = values["weight"].shape
            sizes = (inputs, outputs, linear.bias is not None)
            if form == "int8":
                layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0)
            else:
                layer = bnb.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type=form)
            layer.load_state_dict(values)
            setattr(parent, name, layer.to("cpu"))
    return model


def stored(form: str, model: Any, narrow: bool = False) -> Any:
    """Replace all matrices by those of a GGUF file; `form`: type, or types of the others and of the values."""
    others, _, values = form.partition(" and ")
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                kind = values if values and name == "v_proj" else others
                rows = torch.from_numpy(quantize(layer.weight.numpy(), gguf.GGMLQuantizationType[kind]))
                columns, bias = layer.weight.shape[1], getattr(layer, "bias", None)
                setattr(parent, name, GgufLinear(kind, rows, columns, None, byte_inputs=narrow))
                getattr(parent, name).bias = bias
    if tied:
        model.model.embed_tokens = model.lm_head
    return model


def dequantized(model: Any) -> Any:
    """Replace quantised matrices by float32 layers with their dequantised weights."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if not isinstance(layer, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt, GgufLinear)):
                continue
            if isinstance(layer, GgufLinear):
                weight = dequantised(layer.kind, layer.weight, layer.in_features, torch.float32)
            elif isinstance(layer, bnb.nn.Linear4bit):
                weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            else:
                weight = layer.weight.CB * layer.weight.SCB[:, None] / 127
            linear = nn.Linear(layer.in_features, layer.out_features, bias=False)
            if name == "embed_tokens":
                linear = nn.Embedding(layer.out_features, layer.in_features)
            linear.weight = nn.Parameter(weight.float(), requires_grad=False)
            linear.bias = getattr(layer, "bias", None)
            setattr(parent, name, linear)
    return model


@cache
def weights(name: str, form: str) -> NativeWeights:
    if form in DTYPES:
        return NativeWeights(random_model(CONFIGS[name], form))
    if form in QUANTIZED:
        return NativeWeights(quantized(form, random_model(CONFIGS[name])))
    kind = NARROW.get(form, form)
    return NativeWeights(stored(kind, random_model(config_of(name, kind)), narrow=form in NARROW))


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


class Passes:
    """Passes of an engine over a cache of its own."""

    def __init__(self, engine: Engine[Any], taps: tuple[int, ...] = ()) -> None:
        self.engine, self.cache = engine, engine.open(taps=taps)

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        return self.engine.run([Entry(self.cache, new, held, draft)])[0]

    def keep(self, length: int, slots: Sequence[int]) -> None:
        self.cache.keep(length, slots)
