"""Loading of EAGLE-3 heads in the layouts of SafeAILab and `speculators`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.models.engines.head import Head, HeadWeights
from specdemo.models.engines.llama_weights import ROPE_TYPES, layer_count
from specdemo.models.engines.select import engine_of, head_of
from specdemo.models.hub import Hub, TensorShapes, local_shapes, weight_errors
from specdemo.models.llama_checkpoint import LlamaConfig
from specdemo.models.model_sizes import sizes_of_config
from specdemo.models.spec import HeadSpec
from specdemo.models.untrusted import read_settings, weight_files
from specdemo.worker import ReportProgress, TaskProgress, ignore_progress

if TYPE_CHECKING:
    from specdemo.models.load import LoadedModel

LoadedDrafter: TypeAlias = "LoadedModel | LoadedHead"

_CONVERT = "run specdemo convert-head FILE DIRECTORY and give the directory"
_OTHER_HEAD = "choose a head for this target"
_KINDS = ("eagle3", "Eagle3Speculator", "LlamaForCausalLMEagle3")
_VARIANTS = ("norm_before_fc", "fc_norm", "norm_output")
_FLOATS, _INTEGERS = ("F32", "BF16", "F16"), ("I64", "I32")
_SHARED = ("lm_head.weight", "embed_tokens.weight")
_FILE_OF_TARGET = re.compile(r"([.-](I?Q\d\w*|B?F16|F32))?\.gguf$", re.IGNORECASE)


@dataclass(frozen=True)
class LoadedHead:
    """Head in this process with its specification."""

    spec: HeadSpec
    head: Head

    @property
    def weight_bytes(self) -> int:
        return self.head.weight_bytes

    encoder = False

    @property
    def device(self) -> torch.device:
        return self.head.device


def tap_count(name: str, hub: Hub, report: ReportProgress = ignore_progress) -> int:
    """Return the number of hidden states that a head receives, before it is downloaded. Raises `UserError`."""
    if Path(name).expanduser().is_file():
        raise UserError(f"{name} is a file, and files other than safetensors may contain code: {_CONVERT}")
    listed = _listed_taps(read_settings(name, hub.settings(name, report=report) / "config.json"))
    return len(listed) if isinstance(listed, list) and listed else 3


def head_files(name: str, hub: Hub, report: ReportProgress = ignore_progress) -> tuple[Path, int]:
    """Return the directory of a head and the bytes of its weights. Raises `UserError` for pickles."""
    tap_count(name, hub, report)
    folder = hub.weights(name, report=report, remedy=_CONVERT)
    return folder, sum(path.stat().st_size for path in weight_files(folder))


def load_head(
    spec: HeadSpec, target: LoadedModel, hub: Hub | None = None, report: ReportProgress = ignore_progress
) -> LoadedHead:
    """Load a head for a loaded target. Raises `UserError` for files that do not fit it."""
    return LoadedHead(spec, head_of(read_head(spec, target, hub, report), target.model))


def read_head(
    spec: HeadSpec, target: LoadedModel, hub: Hub | None = None, report: ReportProgress = ignore_progress
) -> HeadWeights:
    if not engine_of(target.model).hidden_states:
        raise UserError(f"heads need hidden states, and {target.name} runs without them: choose method nasd or suffix")
    hub = hub or Hub()
    folder, _ = head_files(spec.name, hub, report)
    config = read_settings(spec.name, folder / "config.json")
    if warning := _verifier_warning(spec, config):
        warnings.warn(warning, stacklevel=2)
    return _weights(spec.name, config, folder, target, report)


def _verifier_warning(spec: HeadSpec, config: Mapping[str, Any]) -> str:
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    trained = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(trained, str) or not trained:
        return ""
    wanted, given = (
        _FILE_OF_TARGET.sub("", name.rstrip("/").rpartition("/")[2]) for name in (trained, spec.target.name)
    )
    if wanted.casefold() == given.casefold():
        return ""
    return f"{spec.title} was trained for {wanted}, and the target is {given}: few drafts may be accepted"


def _weights(
    name: str, config: Mapping[str, Any], folder: Path, target: LoadedModel, report: ReportProgress
) -> HeadWeights:
    layer = config.get("transformer_layer_config", config)
    _refuse_variants(name, config)
    sizes = _Sizes.of(name, config, layer, target)
    shapes = {_common_name(key): value for key, value in local_shapes(name, folder).items()}
    taps = _taps(name, config, layer_count(target.model))
    _check_shapes(name, shapes, sizes.shapes(len(taps), shapes.keys()))
    report(TaskProgress(f"reading {name}"))
    tensors = dict(_read(name, folder))
    ids = _draft_ids(name, tensors.pop("d2t", None), tensors.pop("t2d", None), sizes)
    frequencies, rotary_factor = _frequencies(name, layer, sizes.head_dim)
    return HeadWeights(
        tensors,
        taps,
        ids,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        float(layer.get("rms_norm_eps", 1e-6)),
        frequencies,
        rotary_factor,
        sizes.context,
        config.get("norm_before_residual") is True,
    )


def _refuse_variants(name: str, config: Mapping[str, Any]) -> None:
    listed = config.get("architectures")
    kind = config.get("speculators_model_type") or (listed[0] if isinstance(listed, list) and listed else "")
    if "medusa_num_heads" in config or (config.get("speculators_model_type") and kind not in _KINDS):
        raise UserError(f"{name} is a head of another kind ({kind or 'medusa'}): choose an EAGLE-3 head")
    if variants := [variant for variant in _VARIANTS if config.get(variant)]:
        raise UserError(f"{name} is a variant of EAGLE-3 ({variants[0]}): choose another head")


@dataclass(frozen=True)
class _Sizes:
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    vocab_size: int
    drafted: int  # size of the draft vocabulary
    target_width: int

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], layer: Mapping[str, Any], target: LoadedModel) -> _Sizes:
        def size(key: str, default: int | None = None) -> int:
            value = layer.get(key) or default
            if type(value) is not int:
                raise UserError(f"config.json of {name} has no {key}: choose another head")
            return value

        width, heads = size("hidden_size"), size("num_attention_heads")
        sizes_of_config(layer).check(f"config.json of {name}")
        drafted = config.get("draft_vocab_size") or target.vocab_size
        if type(drafted) is not int:
            raise UserError(f"config.json of {name} has no draft_vocab_size: choose another head")
        return cls(
            width,
            size("intermediate_size"),
            heads,
            size("num_key_value_heads", heads),
            size("head_dim", width // heads),
            size("max_position_embeddings"),
            target.vocab_size,
            drafted,
            target.model.config.get_text_config().hidden_size,
        )

    def shapes(self, taps: int, stored: Collection[str]) -> dict[str, tuple[int, ...]]:
        shares_rows = not {*_SHARED} <= {*stored}
        width = self.target_width if shares_rows else self.width
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (width, taps * self.target_width),
            "norm.weight": (width,),
            "midlayer.hidden_norm.weight": (width,),
            "midlayer.input_layernorm.weight": (width,),
            "midlayer.post_attention_layernorm.weight": (width,),
            "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
            "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
            "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
            "midlayer.self_attn.o_proj.weight": (width, queries),
            "midlayer.mlp.gate_proj.weight": (self.inner, width),
            "midlayer.mlp.up_proj.weight": (self.inner, width),
            "midlayer.mlp.down_proj.weight": (width, self.inner),
        }
        optional = {
            "lm_head.weight": (self.drafted, width),
            "embed_tokens.weight": (self.vocab_size, width),
            "d2t": (self.drafted,),
            "t2d": (self.vocab_size,),
        }
        shapes |= {key: shape for key, shape in optional.items() if key in stored}
        return shapes if self.drafted == self.vocab_size else shapes | {"d2t": (self.drafted,)}


def _common_name(name: str) -> str:
    return re.sub(r"^layers\.0\.", "midlayer.", name)


def _check_shapes(name: str, stored: TensorShapes, needed: Mapping[str, tuple[int, ...]]) -> None:
    for key, shape in needed.items():
        if key not in stored:
            raise UserError(f"{name} has no tensor {key}: choose an EAGLE-3 head")
        dtype, given = stored[key]
        if given != shape:
            raise UserError(f"{key} of {name} has shape {_shown(given)} instead of {_shown(shape)}: {_OTHER_HEAD}")
        allowed = {"d2t": _INTEGERS, "t2d": ("BOOL",)}.get(key, _FLOATS)
        if dtype not in allowed:
            raise UserError(f"{key} of {name} has type {dtype} instead of {allowed[0]}: choose another head")
    if others := sorted(stored.keys() - needed.keys()):
        raise UserError(f"{name} has a tensor unknown to EAGLE-3 ({others[0]}): choose another head")


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def _read(name: str, folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        with weight_errors(name), safe_open(path, "pt") as file:
            for key in file.keys():
                yield _common_name(key), file.get_tensor(key)


def _listed_taps(config: Mapping[str, Any]) -> Any:
    of_eagle = config.get("eagle_config")
    listed = config.get("eagle_aux_hidden_state_layer_ids")
    if not listed and isinstance(of_eagle, dict):
        listed = of_eagle.get("eagle_aux_hidden_state_layer_ids")
    return listed


def _taps(name: str, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    taps = _listed_taps(config) or [2, layers // 2, layers - 3]
    valid = isinstance(taps, list) and all(type(tap) is int for tap in taps)
    if valid and taps[0] == 1:  # outputs of layers
        taps = [tap + 1 for tap in taps]
    if not (valid and all(0 <= tap <= layers for tap in taps) and sorted({*taps}) == taps):
        raise UserError(f"{name} receives the states of layers that the target does not have: {_OTHER_HEAD}")
    return tuple(taps)


def _draft_ids(name: str, offsets: Tensor | None, used: Tensor | None, sizes: _Sizes) -> Tensor | None:
    if offsets is None:
        return None
    ids = offsets.long() + torch.arange(len(offsets))
    if not (0 <= int(ids[0]) and int(ids[-1]) < sizes.vocab_size and bool((ids.diff() > 0).all())):
        raise UserError(f"d2t of {name} leaves the {sizes.vocab_size:,} tokens of the target: {_OTHER_HEAD}")
    if used is not None and not torch.equal(used.nonzero()[:, 0], ids):
        raise UserError(f"t2d of {name} contradicts d2t: choose another head")
    return None if len(ids) == sizes.vocab_size else ids


def _frequencies(name: str, layer: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    stored = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = stored.get("rope_type", stored.get("type", "default")) if isinstance(stored, dict) else ""
    if kind not in ROPE_TYPES or head_dim % 2:
        raise UserError(f"the rotary embedding of {name} is not of kind {', '.join(ROPE_TYPES)}: choose another head")
    theta = stored.get("rope_theta") or layer.get("rope_theta") or 10_000.0
    if kind == "default":
        return theta ** (-torch.arange(0, head_dim, 2).double() / head_dim).float(), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**stored, "rope_type": kind, "rope_theta": theta}
    others = {key: value for key, value in layer.items() if key != "rope_scaling"}
    config = LlamaConfig.from_dict({**others, "rope_parameters": rope, "head_dim": head_dim})
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
