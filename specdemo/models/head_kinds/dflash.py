"""DFlash and DSpark heads in the layouts of z-lab, DeepSpec and `speculators`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from specdemo.core.errors import UserError
from specdemo.models.engines.head import DFlashWeights, LayerSizes
from specdemo.models.engines.llama_weights import layer_count
from specdemo.models.head_kinds.checkpoint import (
    OTHER_HEAD,
    HeadCheckpoint,
    HeadKind,
    layer_shapes,
    layer_sizes,
    target_width,
    valid_taps,
)

if TYPE_CHECKING:
    from specdemo.models.load import LoadedModel

_ARCHITECTURES = {"dflash": ["DFlashDraftModel"], "dspark": ["Qwen3DSparkModel"]}
_MOST = 64  # layers and rows of a block

_Shapes = dict[str, tuple[int, ...]]


def _fits(kind: str, config: Mapping[str, Any]) -> bool:
    if given := config.get("speculators_model_type"):
        return given == kind
    return config.get("architectures") == _ARCHITECTURES[kind]


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings, which z-lab nests."""
    nested = config.get("dflash_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _body(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the layers, which `speculators` nests."""
    nested = config.get("transformer_layer_config", config)
    return nested if isinstance(nested, dict) else {}


def _count_taps(config: Mapping[str, Any]) -> int:
    for key in ("aux_hidden_state_layer_ids", "target_layer_ids"):
        if isinstance(listed := _settings(config).get(key), list) and listed:
            return len(listed)
    layers = config.get("num_hidden_layers")
    return layers if type(layers) is int and "speculators_model_type" not in config else 3


def _taps(config: Mapping[str, Any], layers: int, count: int) -> Any:
    """Return the hidden states of a target of `layers` layers. z-lab and DeepSpec list outputs of layers."""
    settings = _settings(config)
    if "speculators_model_type" in config:
        return settings.get("aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    outputs = settings.get("target_layer_ids")
    if outputs is None:
        outputs = [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)] if count > 1 else [layers // 2]
    return [tap + 1 for tap in outputs] if isinstance(outputs, list) and {*map(type, outputs)} == {int} else None


def _read(kind: str, checkpoint: HeadCheckpoint, target: LoadedModel) -> DFlashWeights:
    name, config = checkpoint.name, checkpoint.config
    settings, body = _settings(config), _body(config)
    layers, block = checkpoint.size(body, "num_hidden_layers", _MOST), checkpoint.size(settings, "block_size", _MOST)
    from_anchor = settings.get("sample_from_anchor", kind == "dspark") is True
    mask_token = settings.get("mask_token_id")
    if type(mask_token) is not int or not 0 <= mask_token < target.vocab_size or block + from_anchor < 2:
        raise UserError(f"{name} has no mask token of the target, or blocks without drafts: {OTHER_HEAD}")
    taps = valid_taps(name, _taps(config, layer_count(target.model), layers), layer_count(target.model))
    layer = layer_sizes(checkpoint, body)
    if layer.width != (width := target_width(target)):
        raise UserError(f"{name} has states of width {layer.width:,} instead of {width:,}: {OTHER_HEAD}")
    drafted = checkpoint.integer(settings, "draft_vocab_size", target.vocab_size)
    needed = _layer_shapes(layer, layers, bool(body.get("attention_bias")))
    needed["fc.weight"] = (width, len(taps) * width)
    if kind == "dspark":
        needed |= _dspark_shapes(checkpoint, settings, width, target.vocab_size, drafted)
    tensors = checkpoint.tensors(kind, partial(_needed, needed, width, drafted, target.vocab_size))
    return DFlashWeights(
        tensors=tensors,
        taps=taps,
        ids=checkpoint.draft_ids(tensors, target.vocab_size),
        layer=layer,
        block=block,
        mask_token=mask_token,
        windows=_windows(checkpoint, body, layers),
        causal_windows=settings.get("sliding_window_non_causal") is not True,
        from_anchor=from_anchor,
    )


def _layer_shapes(layer: LayerSizes, count: int, biased: bool) -> _Shapes:
    shapes: _Shapes = {"hidden_norm.weight": (layer.width,), "norm.weight": (layer.width,)}
    for prefix in (f"layers.{i}." for i in range(count)):
        shapes |= {f"{prefix}input_layernorm.weight": (layer.width,), **layer_shapes(layer, prefix, layer.width)}
        shapes |= {f"{prefix}self_attn.{norm}_norm.weight": (layer.head_dim,) for norm in "qk"}
        for matrix in (f"{prefix}self_attn.{name}_proj" for name in "qkvo" if biased):
            shapes[f"{matrix}.bias"] = shapes[f"{matrix}.weight"][:1]
    return shapes


def _dspark_shapes(
    checkpoint: HeadCheckpoint, settings: Mapping[str, Any], width: int, vocab_size: int, drafted: int
) -> _Shapes:
    """Return the shapes of the Markov and confidence heads."""
    shapes: _Shapes = {}
    rank = checkpoint.size(settings, "markov_rank") if settings.get("markov_rank", 256) else 0
    if (kind := settings.get("markov_head_type", "vanilla")) != "vanilla":
        raise UserError(f"{checkpoint.name} has a Markov head of another kind ({kind}): choose one of kind vanilla")
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (drafted, rank)
    if settings.get("enable_confidence_head", True):
        inputs = width + (rank if settings.get("confidence_head_with_markov", True) else 0)
        shapes |= {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
    return shapes


def _needed(needed: _Shapes, width: int, drafted: int, vocab_size: int, stored: Collection[str]) -> _Shapes:
    optional: _Shapes = {
        "lm_head.weight": (drafted, width),
        "embed_tokens.weight": (vocab_size, width),
        "d2t": (drafted,),
        "t2d": (vocab_size,),
    }
    required = {} if drafted == vocab_size else {"d2t": (drafted,)}
    return needed | {key: shape for key, shape in optional.items() if key in stored} | required


def _windows(checkpoint: HeadCheckpoint, body: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    kinds = body.get("layer_types") or ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UserError(f"layer_types in config.json of {checkpoint.name} do not fit its layers: choose another head")
    if "sliding_attention" not in kinds:
        return (None,) * layers
    if "speculators_model_type" not in checkpoint.config:
        raise UserError(f"{checkpoint.name} has layers with a window: choose a head of speculators")
    window = checkpoint.integer(body, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


DFLASH, DSPARK = (HeadKind(kind, partial(_fits, kind), _count_taps, partial(_read, kind)) for kind in _ARCHITECTURES)
