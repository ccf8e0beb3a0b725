"""Any attention-only `transformers` model as an engine: its own forward pass over a cache that is written in place."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.engines.draft_mask import positions, visible


class InPlaceCacheLayer(CacheLayerMixin):
    """One layer's keys and values in a buffer that is written in place; rolling back moves a length.

    It keeps every position, under a sliding window too (the mask hides what has left the window), because a window
    that has dropped a position cannot take it back when the token that pushed it out is rejected.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shapes, dtype and device from the first states."""
        self.keys, self.values = (states[:, :, :0].clone() for states in (key_states, value_states))
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[1, heads, n, dim]` states; views of all states so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            room = max(256, 2 * self.keys.shape[2], end)
            self.keys, self.values = (self._grown(old, room) for old in (self.keys, self.values))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, old: Tensor, room: int) -> Tensor:
        new = old.new_empty((*old.shape[:2], room, old.shape[3]))
        new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def keep(self, length: int, slots: list[int]) -> None:
        """Keep the first `length` positions and then those in `slots`, in that order."""
        if not self.is_initialized:
            return
        end = length + len(slots)
        if slots and slots != list(range(length, end)):
            index = torch.tensor(slots, device=self.keys.device)
            self.keys[:, :, length:end] = self.keys[:, :, index]
            self.values[:, :, length:end] = self.values[:, :, index]
        self.length = end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a query of this length attends to."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Positions held."""
        return self.length

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    @property
    def nbytes(self) -> int:
        """Bytes of the positions held, without the buffer's spare room."""
        return sum(x[:, :, : self.length].numel() * x.element_size() for x in self.buffers)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Keys and values with their spare room."""
        return (self.keys, self.values) if self.is_initialized else ()


def has_window(model: PreTrainedModel) -> bool:
    """Whether some layer sees the last positions only."""
    config = model.config.get_text_config()
    return "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    )


def can_roll_back(kind: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Whether every layer is attention; a recurrent state cannot un-see a rejected token."""
    layers = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"]
    return not kind._is_stateful and set(layers) <= {"full_attention", "sliding_attention"}


def refuse_recurrent(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise `UserError` for a kind of model that cannot take back a token."""
    if not can_roll_back(kind, config):
        raise UserError(
            f"{kind.__name__} keeps a recurrent state that cannot take back a rejected token: "
            "choose a model with attention layers only"
        )


class TransformersEngine:
    """The model's own forward pass, with `Slots` as its cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        refuse_recurrent(type(model), model.config)
        self._model, self._windowed = model, has_window(model)
        self._layers = [InPlaceCacheLayer() for _ in range(model.config.get_text_config().num_hidden_layers)]
        self._cache = Cache(layers=self._layers)

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        """Feed `new` after the `held` positions; logits `[len(draft) + 1, vocab]` of the last rows.

        Raises `UserError` for forests on a model with a sliding window.
        """
        if self._windowed and not draft.is_chain:
            raise UserError(
                f"{type(self._model).__name__} has a sliding window, whose mask fits chains only: choose a method "
                "that drafts a chain"
            )
        device, dtype = self._model.device, self._model.dtype
        extra = {}
        if not draft.is_chain:
            mask = torch.zeros(len(new), held + len(new), dtype=dtype)
            mask.masked_fill_(~visible(len(new), held, draft), torch.finfo(dtype).min)
            where = torch.tensor([positions(len(new), held, draft)], device=device)
            extra = {"attention_mask": mask[None, None].to(device), "position_ids": where}
        return self._model(
            input_ids=torch.as_tensor(new, device=device)[None],
            past_key_values=self._cache,
            logits_to_keep=len(draft) + 1,
            **extra,
        ).logits[0]

    def keep(self, length: int, slots: list[int]) -> None:
        """Keep the first `length` positions and then those in `slots`, in that order."""
        for layer in self._layers:
            layer.keep(length, slots)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers that they are held in."""
        return sum(x.numel() * x.element_size() for layer in self._layers for x in layer.buffers)
