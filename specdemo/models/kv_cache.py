"""A language model whose KV cache follows whatever token list it is shown.

All cache surgery is decided here. The caller passes the whole token list every time; what the cache holds of it already
is found by content, so nobody rewinds anything and a second turn of a chat feeds only its new tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdemo.core.errors import UserError
from specdemo.core.step import Draft, common_prefix
from specdemo.models.engines.encoder_decoder import EncoderDecoderEngine, has_encoder, opening
from specdemo.models.engines.generic import TransformersEngine
from specdemo.models.engines.llama import borrow_engine, return_engine
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.memory import weight_bytes

NOTHING = torch.empty(0, 0)


class Engine(Protocol):
    """A forward pass over the keys and values of one request."""

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        """Feed `new`, which ends in the draft's nodes, after the `held` positions, the last of which may be nodes too.

        Logits of the last `len(draft) + 1` rows, `[rows, vocab]`; of all, if `new` is shorter.
        """

    def keep(self, length: int, slots: list[int]) -> None:
        """Keep the first `length` positions and then those in `slots`, in that order."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers that they are held in."""


class CachedModel:
    """The model as a function from tokens and a draft to logits, with a KV cache of one request.

    Weights are shared: any number of these may stand on one model. `vocab_size` is that of the logits. Passes of fewer
    than `pad` rows are filled up to as many (`parity.py` says when that is worth it). The encoder of an encoder-decoder
    reads `source`, and tokens are those of its decoder; without one it has something short to read, which is enough to
    time and compare passes. Raises `UserError` for a source that is too long.
    """

    def __init__(self, model: PreTrainedModel | LlamaWeights, pad: int = 1, source: Sequence[int] = ()) -> None:
        config = model.config.get_text_config()
        self.model = model
        self.vocab_size: int = config.vocab_size
        self.context: int = getattr(config, "max_position_embeddings", None) or sys.maxsize  # some have no limit
        if len(source) > self.context:
            raise UserError(
                f"the prompt has {len(source):,} tokens and the encoder reads {self.context:,}: shorten it by at least "
                f"{len(source) - self.context:,}"
            )
        if isinstance(model, LlamaWeights):
            self._engine: Engine = borrow_engine(model)
        elif has_encoder(model.config):
            self._engine = EncoderDecoderEngine(model, source or opening(model))
        else:
            self._engine = TransformersEngine(model)
        self._pad = pad
        self._held: list[int] = []  # tokens of the cache's leading chain,
        self._draft = Draft()  # the forest that hangs on its end,
        self._logits: Tensor | None = None  # and what was found after the last token and after each node

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Raw logits `[len(draft) + 1, vocab]` in one pass.

        Row 0 follows `tokens`, row i + 1 follows node i. Raises `UserError` for a draft that the model cannot score.
        """
        if not tokens:
            raise UserError("there is nothing to continue: give a prompt of at least one token")
        held, known = self._keep(tokens, draft)
        fed = self._filled(draft, held, len(tokens))
        new = [*tokens[held:], *fed.tokens[max(0, held - len(tokens)) :]]
        if len(known) > len(draft):
            logits = known
        else:
            logits = self._run(new, held, fed)
            if len(known):
                logits = torch.cat([known, logits])
        self._held, self._draft, self._logits = list(tokens), draft, logits[: len(draft) + 1]
        return self._logits

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Raw logits `[len(tokens), vocab]` after each of `tokens`, in one pass: the text as a draft of itself."""
        return self.score(tokens[:1], Draft.chain(tuple(tokens[1:])))

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], count: int, pick: Callable[[Tensor, int], Tensor]) -> list[int]:
        """`count` more tokens, each the `pick(logits, i)` `[1]` of the raw logits `[1, vocab]` before it.

        What is picked stays on the device until the last one: the host waits once, not once a token.
        """
        logits = self.score(tokens, Draft())
        picked = [pick(logits, 0)]
        for i in range(1, count):
            logits = self._run(picked[-1], len(tokens) + i - 1, Draft())
            picked.append(pick(logits, i))
        new = torch.cat(picked).tolist()
        self._held, self._logits = [*tokens, *new[:-1]], logits
        return new

    def _run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        try:
            return self._engine.run(new, held, draft)
        except BaseException:  # layers of different lengths: hold nothing
            self._engine.keep(0, [])
            self._held, self._draft = [], Draft()
            raise

    def __del__(self) -> None:
        if isinstance(getattr(self, "model", None), LlamaWeights):
            return_engine(self.model, self._engine)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return self._engine.kv_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a pass goes through."""
        return self.model.weight_bytes if isinstance(self.model, LlamaWeights) else weight_bytes(self.model)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers that they are held in, and of the logits that are kept with them."""
        kept = 0 if self._logits is None else self._logits.untyped_storage().nbytes()
        return self._engine.reserved_bytes + kept

    def _filled(self, draft: Draft, held: int, length: int) -> Draft:
        """The draft with a tail that nobody reads, if the pass would have too few rows and the context has room."""
        spare = min(self._pad - (length - held), self.context - length) - len(draft)
        if spare <= 0:
            return draft
        first = len(draft) - 1 if draft.is_chain else -1
        return Draft(draft.tokens + (0,) * spare, draft.parents + (first, *range(len(draft), len(draft) + spare - 1)))

    def _keep(self, tokens: Sequence[int], draft: Draft) -> tuple[int, Tensor]:
        """Cut the cache to what it shares with `tokens` and the first nodes of `draft`.

        The number of positions kept, and the logits that are wanted and known `[rows, vocab]`. Where a node of the
        draft is not known yet, none behind it is kept.
        """
        assert self._logits is not None or not self._held
        shared = common_prefix(self._held, tokens)
        slots: list[int] = []
        node: int | None = -1 if self._held and shared == len(self._held) else None
        kids: dict[int | None, list[int]] = {**self._draft.children()}

        def child(node: int | None, token: int) -> int | None:
            """The node of the last forest that follows `node` with this token; none follows None."""
            return next((kid for kid in kids.get(node, ()) if self._draft.tokens[kid] == token), None)

        for token in tokens[shared:]:
            node = child(node, token)
            if node is None:
                break
            slots.append(shared + node)
        if node is None or self._logits is None:  # the last token's logits are wanted, so it is fed again
            shared = min(shared, len(tokens) - 1)
            self._engine.keep(shared, slots)
            return shared + len(slots), NOTHING
        old: list[int] = [node]  # nodes of the last forest, by 1 + node of the draft
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            if (node := child(old[parent + 1], token)) is None:
                break
            old.append(node)
        slots += [shared + node for node in old[1:]]
        self._engine.keep(shared, slots)
        return shared + len(slots), self._logits[torch.tensor(old, device=self._logits.device) + 1]
