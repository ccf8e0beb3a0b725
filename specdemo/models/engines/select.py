"""Choice of the engine of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdemo.models.cache_check import cache_support
from specdemo.models.engines.engine import Engine
from specdemo.models.engines.fused_weights import FusedWeights
from specdemo.models.engines.generic import EncoderDecoderEngine, TransformersEngine, UncachedEngine, has_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def engine_of(model: PreTrainedModel | FusedWeights) -> Engine[Any]:
    """Return the engine of converted weights, or one for a `transformers` model.

    Raises `UserError` for models that cannot be used.
    """
    if isinstance(model, FusedWeights):
        return model.engine
    support = cache_support(model)
    if support.uncached:
        return UncachedEngine(model, support.forests)
    if has_encoder(model.config):
        return EncoderDecoderEngine(model, support.forests)
    return TransformersEngine(model, support.forests)
