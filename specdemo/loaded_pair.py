"""Pairs of loaded models for the Python API."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdemo.core.errors import UserError
from specdemo.core.events import ReportProgress, ignore_progress
from specdemo.models.load import in_memory_model
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import SAME
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LOADING = ("dtype", "quantization", "drafter_quantization", "activations", "device", "drafter_device")


class LoadedPair:
    """Target and optional drafter in memory; `generate` accepts it in place of a `ModelPool`."""

    def __init__(self, pool: ModelPool, chosen: Recipe) -> None:
        """`chosen` selects the models in `pool`."""
        self.pool, self._chosen = pool, chosen

    def bind(self, recipe: Recipe) -> Recipe:
        """Return `recipe` with the models of this pair. Raises `UserError` if it selects other models."""
        chosen = {name: getattr(self._chosen, name) for name in ("pair", "target", "drafter", *_LOADING)}
        for name, value in chosen.items():
            if getattr(recipe, name) not in (getattr(Recipe, name), value):
                raise UserError(f"the recipe sets {name}, but the models are already loaded: pass {name} to load_pair")
        return replace(recipe, **chosen)


def load_pair(
    target: str | PreTrainedModel = "bundled",
    drafter: str | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter_tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    drafter_quantization: str = "none",
    activations: str = "auto",
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
    pool = ModelPool()
    values = (dtype, quantization, drafter_quantization, activations, device, drafter_device)
    options: dict[str, Any] = dict(zip(_LOADING, values, strict=True))
    if not isinstance(target, str):
        changed = [name for name, value in options.items() if value != getattr(Recipe, name)]
        if changed:
            raise UserError(f"{changed[0]} does not apply to models in memory: omit it")
        loaded = {"target": in_memory_model("target", target, tokenizer)}
        if drafter is not None:
            loaded["drafter"] = in_memory_model("drafter", drafter, drafter_tokenizer or tokenizer)
        for model in loaded.values():
            pool.add(model)
        names: dict[str, Any] = {role: model.spec.name for role, model in loaded.items()}
        return LoadedPair(pool, replace(Recipe(method="ar"), **names))
    if tokenizer is not None or drafter_tokenizer is not None or not isinstance(drafter, str | None):
        raise UserError("names and models in memory cannot be combined: give two names or two models")
    options["pair" if target in PAIRS and drafter in (None, SAME) else "target"] = target
    chosen = replace(Recipe(), method="ar", drafter=drafter, **options)
    for progress in pool.ensure_loaded(
        [spec for spec in (chosen.spec("target"), chosen.spec("drafter")) if spec is not None]
    ):
        report(progress)
    return LoadedPair(pool, chosen)
