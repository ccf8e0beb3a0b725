"""Engine for any attention-only `transformers` model: its forward pass over a preallocated KV cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from specdemo.core.errors import UserError
from specdemo.core.step import Draft


def positions(rows: int, held: int, draft: Draft) -> list[int]:
    """Return the text position of each of `rows` new tokens, which end with the last nodes of `draft`.

    `held`: cached positions of the text and possibly of the first nodes.
    """
    length = held + rows - len(draft)
    nodes = range(max(0, held - length), len(draft))
    return [*range(held, length), *(length + len(draft.path(node)) - 1 for node in nodes)]


def visible(rows: int, held: int, draft: Draft) -> Tensor:
    """Return the attention mask `[rows, held + rows]`, True where visible: the text and a node's ancestors."""
    length = held + rows - len(draft)
    seen = torch.ones(rows, held + rows, dtype=torch.bool).tril(held)
    for node in range(max(0, held - length), len(draft)):
        row = seen[length - held + node]
        row[length:] = False
        row[[length + ancestor for ancestor in draft.path(node)]] = True
    return seen


class InPlaceCacheLayer(CacheLayerMixin):
    """KV cache of one layer in a preallocated buffer; a rollback changes only its length.

    Stores all positions even for sliding windows, since a rollback may need them again.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (states[:, :, :0].clone() for states in (key_states, value_states))
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[1, heads, n, dim]` states; return views of all states."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            capacity = max(256, 2 * self.keys.shape[2], end)
            self.keys, self.values = (self._grown(old, capacity) for old in (self.keys, self.values))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
        new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def keep(self, length: int, slots: list[int]) -> None:
        if not self.is_initialized:
            return
        end = length + len(slots)
        if slots and slots != list(range(length, end)):
            index = torch.tensor(slots, device=self.keys.device)
            self.keys[:, :, length:end] = self.keys[:, :, index]
            self.values[:, :, length:end] = self.values[:, :, index]
        self.length = end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    @property
    def nbytes(self) -> int:
        return sum(x[:, :, : self.length].numel() * x.element_size() for x in self.buffers)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return (self.keys, self.values) if self.is_initialized else ()


def has_window(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    )


def can_roll_back(kind: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """True if all layers store keys and values only: other states cannot be rolled back."""
    return not kind._is_stateful and not _other_layers(config)


def refuse_recurrent(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    if not can_roll_back(kind, config):
        others = f" ({', '.join(_other_layers(config))})" if _other_layers(config) else ""
        raise UserError(
            f"{kind.__name__} keeps a state{others} that cannot take back a rejected token: choose a model with "
            "ordinary attention layers only"
        )


def _other_layers(config: PretrainedConfig) -> list[str]:
    layers = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return sorted({*layers} - {"full_attention", "sliding_attention", "chunked_attention"})


class TransformersEngine:
    def __init__(self, model: PreTrainedModel) -> None:
        refuse_recurrent(type(model), model.config)
        self._model = model
        self._cache = Cache(layer_class_to_replicate=InPlaceCacheLayer)  # some models have several caches per layer
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        """See `CacheEngine.run`. Forests are exact only where `cache_support` reports no limit."""
        device, dtype = self._model.device, self._model.dtype
        extra: dict[str, Any] = {"logits_to_keep": len(draft) + 1} if self._selects_rows else {}
        if not draft.is_chain:
            mask = torch.zeros(len(new), held + len(new), dtype=dtype)
            mask.masked_fill_(~visible(len(new), held, draft), torch.finfo(dtype).min)
            position_ids = torch.tensor([positions(len(new), held, draft)], device=device)
            extra |= {"attention_mask": mask[None, None].to(device), "position_ids": position_ids}
        logits = self._model(
            input_ids=torch.as_tensor(new, device=device)[None], past_key_values=self._cache, use_cache=True, **extra
        ).logits[0]
        return logits[-len(draft) - 1 :]

    @property
    def layers(self) -> list[InPlaceCacheLayer]:
        return self._cache.layers

    def keep(self, length: int, slots: list[int]) -> None:
        for layer in self.layers:
            layer.keep(length, slots)

    @property
    def kv_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def reserved_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer.buffers)
