"""Pairs of loaded models for the Python API."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from specdemo.core.errors import UserError, check_name
from specdemo.core.step import Draft
from specdemo.models.cache_check import cache_support
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.memory import weight_bytes
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import COPY_FORMS, DTYPES, QUANTIZATIONS, SAME, ModelSpec, smaller_copy
from specdemo.models.zoo import PAIRS, REVISIONS, named_models
from specdemo.worker import ReportProgress, ignore_progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_RecipeT = TypeVar("_RecipeT")  # specdemo.recipe imports this package

_DEFAULTS = {  # recipe fields that select and load models
    "pair": None,
    "target": None,
    "drafter": None,
    "dtype": "auto",
    "quantization": "none",
    "drafter_quantization": "none",
    "device": "auto",
    "drafter_device": None,
}


class LoadedPair:
    """Target and optional drafter in memory; `generate` accepts it in place of a `ModelPool`."""

    def __init__(self, pool: ModelPool, **settings: Any) -> None:
        """`settings`: recipe fields that select models in `pool`."""
        self.pool, self._settings = pool, {**_DEFAULTS, **settings}

    def bind(self, recipe: _RecipeT) -> _RecipeT:
        """Return `recipe` with the models of this pair. Raises `UserError` if it selects other models."""
        for name, default in _DEFAULTS.items():
            if getattr(recipe, name) not in (default, self._settings[name]):
                raise UserError(f"the recipe sets {name}, but the models are already loaded: pass {name} to load_pair")
        return replace(recipe, **self._settings)  # type: ignore[type-var]


def load_pair(
    target: str | PreTrainedModel = "bundled",
    drafter: str | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    drafter_quantization: str = "none",
    device: str = "auto",
    drafter_device: str | None = None,
    report: ReportProgress = ignore_progress,
) -> LoadedPair:
    """Load a target and an optional drafter for `generate`. Raises `UserError`.

    By name: `target` is a ready pair, or both are Hugging Face ids or local directories; drafter "same" is the target,
    quantised. `report` receives progress.
    In memory: both are `transformers` models with their `tokenizer` (and `drafter_tokenizer`). They run their own
    forward pass on shared tensors and remain unmodified; loading options do not apply.
    """
    if drafter == SAME and drafter_quantization == "none":
        drafter_quantization = COPY_FORMS[0]
    options: dict[str, Any] = {
        "dtype": dtype,
        "quantization": quantization,
        "drafter_quantization": drafter_quantization,
        "device": device,
        "drafter_device": drafter_device,
    }
    if not isinstance(target, str):
        changed = [name for name, value in options.items() if value != _DEFAULTS[name]]
        if changed:
            raise UserError(f"{changed[0]} does not apply to models in memory: omit it")
        return _in_memory_pair(target, drafter, tokenizer, drafter_tokenizer)
    if tokenizer is not None or drafter_tokenizer is not None or not isinstance(drafter, str | None):
        raise UserError("names and models in memory cannot be combined: give two names or two models")
    check_name("dtype", dtype, DTYPES)
    for name in (quantization, drafter_quantization):
        check_name("quantization", name, QUANTIZATIONS)
    names = {"pair" if target in PAIRS and drafter in (None, SAME) else "target": target, "drafter": drafter}
    specs = _specs(*named_models(**names), drafter == SAME, **options)
    pool = ModelPool()
    for progress in pool.bring(specs):
        report(progress)
    return LoadedPair(pool, **names, **options)


def _specs(
    target: str,
    drafter: str | None,
    copied: bool,
    dtype: str,
    quantization: str,
    drafter_quantization: str,
    device: str,
    drafter_device: str | None,
) -> list[ModelSpec]:
    spec = ModelSpec(target, dtype, quantization, device, REVISIONS.get(target))
    drafter_device = drafter_device or device
    if copied:
        return [spec, smaller_copy(spec, drafter_quantization, drafter_device)]
    if drafter is None:
        return [spec]
    return [spec, ModelSpec(drafter, dtype, drafter_quantization, drafter_device, REVISIONS.get(drafter))]


def _in_memory_pair(
    target: PreTrainedModel,
    drafter: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    drafter_tokenizer: PreTrainedTokenizerBase | None,
) -> LoadedPair:
    from transformers import PreTrainedModel

    pool, settings = ModelPool(), {}
    for role, model in (("target", target), ("drafter", drafter)):
        if model is None:
            continue
        if not isinstance(model, PreTrainedModel) or not model.can_generate():
            raise UserError(f"the {role} is a {type(model).__name__}: pass a transformers model that generates text")
        own = drafter_tokenizer if role == "drafter" and drafter_tokenizer is not None else tokenizer
        if own is None:
            raise UserError("models in memory need their tokenizer: pass tokenizer=")
        origin = f" ({model.name_or_path})" if model.name_or_path else ""
        spec = ModelSpec(f"in-memory {role} {type(model).__name__}{origin}")
        shared = share_weights(model)
        with closing(CachedModel(shared)) as cached:
            cached.score([0], Draft.chain((0,)))  # rejects unsupported models
        engine = f"transformers: in-memory model, weights shared{cache_support(shared).note}"
        pool.add(LoadedModel(spec, shared, own, weight_bytes(shared), engine))
        settings[role] = spec.name
    return LoadedPair(pool, **settings)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the module tree of `model` in eval mode, sharing every parameter and buffer.

    Changes of mode, configuration and buffers affect only the copy. Raises `UserError` for LLM.int8() layers, which
    modify their weights in the first pass.
    """
    tensors = (*model.parameters(), *model.buffers())
    if any(type(tensor).__name__ == "Int8Params" for tensor in tensors):
        raise UserError("8-bit models in memory are not supported: load the pair by name with quantization int8")
    shared = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
    # other implementations ignore the masks of draft trees
    if shared.config._attn_implementation not in ("eager", "sdpa"):
        shared.set_attn_implementation("sdpa")
    return shared
