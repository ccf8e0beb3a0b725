"""Choice of the engine that runs a model or a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specdemo.models.cache_check import cache_support
from specdemo.models.engines.engine import Engine
from specdemo.models.engines.fused_weights import FusedWeights
from specdemo.models.engines.generic import EncoderDecoderEngine, TransformersEngine, UncachedEngine, has_encoder
from specdemo.models.engines.head import (
    DFlashWeights,
    Eagle3Weights,
    EagleWeights,
    Head,
    HeadWeights,
    MedusaWeights,
)
from specdemo.models.engines.llama import LlamaEngine
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.medusa_head import MedusaHead
from specdemo.models.engines.native import NativeEngine
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.torch_dflash import TorchDFlash
from specdemo.models.engines.torch_head import TorchEagle, TorchEagle3

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


def head_of(weights: HeadWeights, model: PreTrainedModel | FusedWeights) -> Head:
    """Return a head that drafts for `model`, on its engine."""
    return _HEADS[type(weights)](weights, model)


def _eagle3(weights: Eagle3Weights, model: PreTrainedModel | FusedWeights) -> Head:
    if isinstance(model, NativeWeights) and not weights.has_further_norms:
        return NativeHead(weights, model)
    return TorchEagle3(weights, model)


_HEADS: dict[type[HeadWeights], Callable[[Any, PreTrainedModel | FusedWeights], Head]] = {
    EagleWeights: TorchEagle,
    Eagle3Weights: _eagle3,
    MedusaWeights: MedusaHead,
    DFlashWeights: TorchDFlash,
}
