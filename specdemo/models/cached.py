"""A causal language model whose KV cache follows whatever token list it is shown.

All cache surgery lives here. The caller passes the whole token list every time; what the cache holds of it already is
found by content, so nobody rewinds anything and a second turn of a chat feeds only its new tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from specdemo.core.errors import Refused
from specdemo.core.step import Draft


class Slots(CacheLayerMixin):
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
        if not self.is_initialized:
            return 0
        return sum(x[:, :, : self.length].numel() * x.element_size() for x in (self.keys, self.values))


def can_roll_back(model: PreTrainedModel) -> bool:
    """Whether every layer is attention; a recurrent state cannot un-see a rejected token."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
    return not model._is_stateful and set(kinds) <= {"full_attention", "sliding_attention"}


class CachedModel:
    """The model as a function from tokens and a draft to logits, with a KV cache of one request.

    Weights are shared: any number of these may stand on one model. `vocab_size` is that of the logits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        if not can_roll_back(model):
            raise Refused(
                f"{type(model).__name__} keeps a recurrent state that cannot take back a rejected token: "
                "choose a model with attention layers only"
            )
        self.model = model
        self.vocab_size: int = config.vocab_size
        self.context: int = getattr(config, "max_position_embeddings", None) or sys.maxsize  # some have no limit
        self._windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
            getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        )
        self._layers = [Slots() for _ in range(config.num_hidden_layers)]
        self._cache = Cache(layers=self._layers)
        self._held: list[int] = []  # tokens of the cache's leading chain
        self._draft = Draft()  # and the forest that hangs on its end

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Raw logits `[len(draft) + 1, vocab]` in one pass.

        Row 0 follows `tokens`, row i + 1 follows node i. Raises `Refused` for forests on a model with a sliding window.
        """
        if not tokens:
            raise Refused("there is nothing to continue: give a prompt of at least one token")
        if self._windowed and not draft.is_chain:
            raise Refused(
                f"{type(self.model).__name__} has a sliding window, whose mask fits chains only: choose a method "
                "that drafts a chain"
            )
        held = self._keep(tokens)
        new = [*tokens[held:], *draft.tokens]
        device = self.model.device
        extra = {} if draft.is_chain else self._forest(len(tokens), held, draft)
        try:
            logits = self.model(
                input_ids=torch.tensor([new], device=device),
                past_key_values=self._cache,
                logits_to_keep=len(draft) + 1,
                **extra,
            ).logits[0]
        except BaseException:
            self._forget()
            raise
        self._held, self._draft = list(tokens), draft
        return logits

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return sum(layer.nbytes for layer in self._layers)

    def _forget(self) -> None:
        """A pass that broke half-way leaves layers of different lengths: hold nothing."""
        for layer in self._layers:
            layer.keep(0, [])
        self._held, self._draft = [], Draft()

    def _keep(self, tokens: Sequence[int]) -> int:
        """Cut the cache to what it shares with `tokens`, less the last one, whose logits are wanted; its length."""
        shared = _common(self._held, tokens)
        slots = []
        if shared == len(self._held):  # then perhaps a path of the last forest too
            kids, node = self._draft.children(), -1
            for token in tokens[shared:-1]:
                node = next((kid for kid in kids.get(node, ()) if self._draft.tokens[kid] == token), None)
                if node is None:
                    break
                slots.append(shared + node)
        shared = min(shared, len(tokens) - 1)
        for layer in self._layers:
            layer.keep(shared, slots)
        return shared + len(slots)

    def _forest(self, length: int, held: int, draft: Draft) -> dict[str, Tensor]:
        """Positions and a float mask `[1, 1, rows, keys]`: a node sees the tokens before it and its own ancestors."""
        rows, keys = length - held + len(draft), length + len(draft)
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(held)
        seen[length - held :, length:] = False
        positions = list(range(held, length))
        for node in range(len(draft)):
            path = draft.path(node)
            seen[length - held + node, [length + one for one in path]] = True
            positions.append(length + len(path) - 1)
        device, dtype = self.model.device, self.model.dtype
        mask = torch.zeros(rows, keys, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        return {
            "attention_mask": mask[None, None].to(device),
            "position_ids": torch.tensor([positions], device=device),
        }


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix; a bisection over comparisons that run at the speed of C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
