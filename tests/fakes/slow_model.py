"""Model with long passes."""

from transformers import LlamaConfig

from fakes.tiny_models import LLAMA, from_config
from specdemo.models.engines.native_weights import NativeWeights

LAYERS = 1000


def slow_model() -> NativeWeights:
    """Return a model with `LAYERS` layers of equal weights: a pass over a prompt takes many seconds."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "max_position_embeddings": 512}
    model = from_config(LlamaConfig(**{**LLAMA, **sizes})).eval().requires_grad_(False)
    return NativeWeights(model).with_layers([0] * LAYERS)
