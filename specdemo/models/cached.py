"""A causal language model whose KV cache follows whatever token list it is shown.

All cache surgery is decided here. The caller passes the whole token list every time; what the cache holds of it already
is found by content, so nobody rewinds anything and a second turn of a chat feeds only its new tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdemo.core.errors import Refused
from specdemo.core.step import Draft
from specdemo.models.engine import borrow, give_back
from specdemo.models.lean import Lean
from specdemo.models.slots import SlotEngine


class Engine(Protocol):
    """A forward pass over the keys and values of one request."""

    def run(self, new: list[int], held: int, draft: Draft) -> Tensor:
        """Feed `new`, which ends in the draft's nodes, after the `held` positions.

        Logits `[len(draft) + 1, vocab]` of the last rows.
        """

    def keep(self, length: int, slots: list[int]) -> None:
        """Keep the first `length` positions and then those in `slots`, in that order."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""


class CachedModel:
    """The model as a function from tokens and a draft to logits, with a KV cache of one request.

    Weights are shared: any number of these may stand on one model. `vocab_size` is that of the logits. Passes of fewer
    than `pad` rows are filled up to as many (`parity.py` says when that is worth it).
    """

    def __init__(self, model: PreTrainedModel | Lean, pad: int = 1) -> None:
        config = model.config.get_text_config()
        self._model = model
        self._engine: Engine = borrow(model) if isinstance(model, Lean) else SlotEngine(model)
        self.vocab_size: int = config.vocab_size
        self.context: int = getattr(config, "max_position_embeddings", None) or sys.maxsize  # some have no limit
        self._pad = pad
        self._held: list[int] = []  # tokens of the cache's leading chain
        self._draft = Draft()  # and the forest that hangs on its end

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Raw logits `[len(draft) + 1, vocab]` in one pass.

        Row 0 follows `tokens`, row i + 1 follows node i. Raises `Refused` for a draft that the model cannot score.
        """
        if not tokens:
            raise Refused("there is nothing to continue: give a prompt of at least one token")
        held = self._keep(tokens)
        fed = self._filled(draft, held, len(tokens))
        try:
            logits = self._engine.run([*tokens[held:], *fed.tokens], held, fed)[: len(draft) + 1]
        except BaseException:  # layers of different lengths: hold nothing
            self._engine.keep(0, [])
            self._held, self._draft = [], Draft()
            raise
        self._held, self._draft = list(tokens), draft
        return logits

    def __del__(self) -> None:
        if isinstance(getattr(self, "_model", None), Lean):
            give_back(self._model, self._engine)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return self._engine.kv_bytes

    def _filled(self, draft: Draft, held: int, length: int) -> Draft:
        """The draft with a tail that nobody reads, if the pass would have too few rows and the context has room."""
        spare = min(self._pad - (length - held), self.context - length) - len(draft)
        if spare <= 0:
            return draft
        first = len(draft) - 1 if draft.is_chain else -1
        return Draft(draft.tokens + (0,) * spare, draft.parents + (first, *range(len(draft), len(draft) + spare - 1)))

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
        self._engine.keep(shared, slots)
        return shared + len(slots)


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
