"""Model with long passes."""

import signal
from typing import Any

from transformers import LlamaConfig

from fakes.tiny_models import LLAMA, from_config
from specdemo.core.step import Draft
from specdemo.models.engines.native import NativeEngine
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.signals import handle_signals, signals_end_passes

LAYERS = 1000


def slow_model() -> NativeWeights:
    """Return a model with `LAYERS` layers of equal weights: a pass over a prompt takes many seconds."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "max_position_embeddings": 512}
    model = from_config(LlamaConfig(**{**LLAMA, **sizes})).eval().requires_grad_(False)
    return NativeWeights(model).with_layers([0] * LAYERS)


def slow_pass() -> None:
    """Print `begin` before a pass that signals end, and `complete` after it; for a process of its own."""
    model, call = CachedModel(slow_model()), NativeEngine._call

    def announced(*arguments: Any) -> Any:
        print("begin", flush=True)
        return call(*arguments)

    NativeEngine._call = announced  # type: ignore[method-assign]
    with handle_signals(signal.default_int_handler, signal.SIGINT, signal.SIGTERM), signals_end_passes():
        model.score([1] * 250, Draft())
    print("complete", flush=True)
