"""Construction of small random models with the structure of a configuration."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_PARAMETERS = 20_000_000
_VOCABULARY = 96
_SIZES = (  # the first match determines the largest value; None allows any
    (r"_ids?$|_index$", _VOCABULARY - 1),
    (r"type_vocab|segment|^seed$|^(vision|audio|keep)_|chunk_size_feed_forward", None),
    (r"vocab", _VOCABULARY),
    (r"shared_layers|per_stack$", 2),
    (r"rotary_dim$|nope_head_dim", 8),
    (r"v_head_dim", 12),
    (r"qk_head_dim", 24),
    (r"(head_dim|d_head|d_kv|dim_head|head_size|kv_channels)$", 16),
    (r"(kv|key_value)_heads$", 2),
    (r"heads?(_per_layer)?$", 4),
    (r"top_?k_group|n_group|expert_group", 2),
    (r"top_?k|per_tok|moe_k$", 2),
    (r"(?<!shared_)experts?$|expert_num$", 4),
    (r"rank$", 24),
    (r"window|chunk|local_", 8),  # windows are shorter than the compared texts
    (r"position|length|seq_len|n_ctx", 128),
    (r"first_k_dense|num_dense_layers", 1),
)
_WIDE, _NARROW = 256, 64  # all other widths become narrow
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_ENCODER_DEPTHS = ("encoder_layers", "num_encoder_layers")
_UNRELATED = {"dtype": None, "architectures": None, "_name_or_path": ""}


def reduced(kind: type[PreTrainedModel], config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy with small widths and two layers of each sort."""
    if kind.config_class and not isinstance(config, kind.config_class):  # the model is multimodal
        config = config.get_text_config(decoder=True)
    small = copy.deepcopy(config)
    for part in _parts(small):
        _reduce(part)
    for name, value in _UNRELATED.items():
        setattr(small, name, value)
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    return small


def small_twin(kind: type[PreTrainedModel], small: PretrainedConfig) -> PreTrainedModel:
    """Build a random float32 model."""
    attention = small._attn_implementation if small._attn_implementation in ("eager", "sdpa") else None
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind._from_config(small).parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"the reduced model has {count:,} parameters")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = kind._from_config(small, dtype=torch.float32, attn_implementation=attention)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:  # flat attention hides wrong masks
                    weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
    return model.eval().requires_grad_(False)


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    inner = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [config, *(part for child in inner for part in _parts(child))]


def _reduce(config: PretrainedConfig) -> None:
    varied = config.__dict__.pop("_heterogeneity_spec", None)
    overrides = varied.per_layer_overrides if varied else {}
    settings = dict(vars(config))
    depth = next((settings[name] for name in _DEPTHS if settings.get(name)), 0)
    per_layer = [value for value in settings.values() if isinstance(value, (list, tuple)) and len(value) == depth]
    layers = _retained_layers([str([overrides.get(i), *(listed[i] for listed in per_layer)]) for i in range(depth)])
    shrink = 16 / (settings.get("head_dim") or 16)
    for name, value in settings.items():
        if name in _DEPTHS:
            small: Any = len(layers)
        elif name in _ENCODER_DEPTHS:
            small = min(value, 2)
        elif any(value is listed for listed in per_layer):
            small = type(value)(_smaller(name, value[i]) for i in layers)
        elif name.endswith("key_value_heads") and value == settings.get("num_attention_heads"):
            small = _smaller("num_attention_heads", value)
        elif name.startswith("rope_") and isinstance(value, dict):
            small = _smaller_rotation(value, shrink)
        else:
            small = _smaller(name, value)
        if small is not value:
            setattr(config, name, small)
    if varied:
        config.per_layer_config = {
            i: {name: _smaller_than(settings.get(name), name, value) for name, value in overrides[layer].items()}
            for i, layer in enumerate(layers)
            if layer in overrides
        }


def _retained_layers(sorts: list[str]) -> list[int]:
    first, last = {sort: i for i, sort in reversed([*enumerate(sorts)])}, {sort: i for i, sort in enumerate(sorts)}
    ends = {i for sort in [*dict.fromkeys(sorts)][:4] for i in (first[sort], last[sort])}
    return sorted({*ends, 0, len(sorts) - 1} if sorts else ends)


def _smaller_than(default: Any, name: str, value: Any) -> Any:
    small = _smaller(name, value)
    if not isinstance(value, int) or not isinstance(default, int) or small != _smaller(name, default):
        return small
    return 2 * small if value > default else max(1, small // 2)


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_smaller(name, item) for item in value]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return value
    for pattern, size in _SIZES:
        if re.search(pattern, name):
            return value if size is None else min(value, size)
    return _NARROW if value >= _WIDE else value


def _smaller_rotation(settings: dict[str, Any], shrink: float) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            small[name] = _smaller_rotation(value, shrink)
        elif isinstance(value, list) and name.endswith("section"):
            small[name] = [max(1, round(item * shrink)) for item in value]
        elif isinstance(value, list):
            small[name] = value[: max(1, round(len(value) * shrink))]
        else:
            small[name] = value
    return small
