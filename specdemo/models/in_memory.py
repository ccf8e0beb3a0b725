"""Models in memory of the caller, used with shared weights."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import TYPE_CHECKING, Any

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.cache_check import cache_support
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.memory import weight_bytes
from specdemo.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def in_memory_model(role: str, model: Any, tokenizer: PreTrainedTokenizerBase | None) -> LoadedModel:
    """Share the weights of `model`. Raises `UserError` unless it is a supported `transformers` model."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise UserError(f"the {role} is a {type(model).__name__}: pass a transformers model that generates text")
    if tokenizer is None:
        raise UserError("models in memory need their tokenizer: pass tokenizer=")
    origin = f" ({model.name_or_path})" if model.name_or_path else ""
    spec = ModelSpec(f"in-memory {role} {type(model).__name__}{origin}")
    shared = share_weights(model)
    with closing(CachedModel(shared)) as cached:
        cached.score([0], Draft.chain((0,)))  # rejects unsupported models
    engine = f"transformers: in-memory model, weights shared{cache_support(shared).note}"
    return LoadedModel(spec, shared, tokenizer, weight_bytes(shared), engine)


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
