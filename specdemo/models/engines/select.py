"""Choice of the engine that runs a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specdemo.models.cache_check import cache_support
from specdemo.models.engines.engine import Engine, FusedWeights
from specdemo.models.engines.generic import EncoderDecoderEngine, TransformersEngine, UncachedEngine, has_encoder
from specdemo.models.engines.llama import LlamaEngine
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native import NativeEngine
from specdemo.models.engines.native_weights import NativeWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ENGINES: dict[type[FusedWeights], Callable[[Any], Engine[Any]]] = {
    LlamaWeights: LlamaEngine,
    NativeWeights: NativeEngine,
}


def engine_of(model: PreTrainedModel | FusedWeights) -> Engine[Any]:
    """Return the engine of converted weights, or a new one for a `transformers` model.

    Raises `UserError` for models that cannot be used.
    """
    if isinstance(model, FusedWeights):
        if model.engine is None:
            model.engine = _ENGINES[type(model)](model)
            model.engine.reusable &= not model.temporary  # model, engine and idle caches are a reference cycle
        return model.engine
    support = cache_support(model)
    if support.uncached:
        return UncachedEngine(model, support.forests)
    if has_encoder(model.config):
        return EncoderDecoderEngine(model, support.forests)
    return TransformersEngine(model, support.forests)
