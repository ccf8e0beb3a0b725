"""A language model with a KV cache that follows the given token list.

Callers always pass all tokens. `CachedModel` compares them with the cached tokens, feeds the difference and decides
every rollback, so rejected drafts and new chat turns need no special handling.
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
from specdemo.models.cache_check import cache_support
from specdemo.models.engines.encoder_decoder import EncoderDecoderEngine, has_encoder, opening
from specdemo.models.engines.generic import TransformersEngine
from specdemo.models.engines.llama import borrow_engine, return_engine
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.uncached import UncachedEngine
from specdemo.models.memory import weight_bytes


def _engine(model: PreTrainedModel, source: Sequence[int], uncached: bool) -> CacheEngine:
    if has_encoder(model.config):
        source = source or opening(model)
        return UncachedEngine(model, source) if uncached else EncoderDecoderEngine(model, source)
    return UncachedEngine(model, ()) if uncached else TransformersEngine(model)


_NO_LOGITS = torch.empty(0, 0)


class CacheEngine(Protocol):
    """Forward passes over the KV cache of one request."""

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        """Feed `new` after `held` cached positions; the draft's nodes are the last of both together.

        Returns logits `[rows, vocab]` of the last `len(draft) + 1` rows, or of all rows if `new` is shorter.
        """

    def keep(self, length: int, slots: list[int]) -> None:
        """Keep the first `length` positions followed by the positions `slots`."""

    @property
    def kv_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...


class CachedModel:
    """Function from tokens and a draft to logits, with the KV cache of one request.

    Instances share `model`. Passes are padded to `pad` rows, see `batch_invariance`. An encoder-decoder encodes
    `source`; tokens are then decoder tokens. Raises `UserError` if `source` exceeds the context.
    """

    def __init__(self, model: PreTrainedModel | LlamaWeights, pad: int = 1, source: Sequence[int] = ()) -> None:
        config = model.config.get_text_config()
        self.model = model
        self.vocab_size: int = config.vocab_size
        self.context: int = getattr(config, "max_position_embeddings", None) or sys.maxsize  # T5 has no limit
        if len(source) > self.context:
            raise UserError(
                f"the prompt has {len(source):,} tokens and the encoder reads {self.context:,}: shorten it by at least "
                f"{len(source) - self.context:,}"
            )
        if isinstance(model, LlamaWeights):
            self._engine: CacheEngine = borrow_engine(model)
            self.chains_only = ""  # or the reason why forests are not exact
        else:
            support = cache_support(model)
            self.chains_only = support.forests
            self._engine = _engine(model, source, bool(support.uncached))
        self._pad = pad
        self._held: list[int] = []
        self._draft = Draft()
        self._logits: Tensor | None = None  # rows after the last token and after each draft node

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Compute raw logits `[len(draft) + 1, vocab]` in one pass.

        Row 0 follows `tokens`, row i + 1 follows node i. Raises `UserError` for an unsupported draft shape.
        """
        if self.chains_only and not draft.is_chain:
            raise UserError(
                f"{type(self.model).__name__} supports chains only, because it {self.chains_only}: choose a method "
                "that drafts a chain"
            )
        if not tokens:
            raise UserError("the prompt is empty: give a prompt of at least one token")
        held, known = self._keep(tokens, draft)
        padded = self._padded(draft, held, len(tokens))
        new = [*tokens[held:], *padded.tokens[max(0, held - len(tokens)) :]]
        if len(known) > len(draft):
            logits = known
        else:
            logits = self._run(new, held, padded)
            if len(known):
                logits = torch.cat([known, logits])
        self._held, self._draft, self._logits = list(tokens), draft, logits[: len(draft) + 1]
        return self._logits

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Compute raw logits `[len(tokens), vocab]` after each of `tokens` in one pass."""
        return self.score(tokens[:1], Draft.chain(tuple(tokens[1:])))

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], count: int, pick: Callable[[Tensor, int], Tensor]) -> list[int]:
        """Generate `count` tokens with `pick(logits, i)`, synchronising with the host once."""
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
        except BaseException:  # layers may have different lengths now
            self._engine.keep(0, [])
            self._held, self._draft = [], Draft()
            raise

    def __del__(self) -> None:
        if isinstance(getattr(self, "model", None), LlamaWeights):
            return_engine(self.model, self._engine)

    @property
    def kv_bytes(self) -> int:
        return self._engine.kv_bytes

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes if isinstance(self.model, LlamaWeights) else weight_bytes(self.model)

    @property
    def reserved_bytes(self) -> int:
        logits = 0 if self._logits is None else self._logits.untyped_storage().nbytes()
        return self._engine.reserved_bytes + logits

    def _padded(self, draft: Draft, held: int, length: int) -> Draft:
        """Append unused nodes to the draft, up to `pad` rows in the pass or the end of the context."""
        spare = min(self._pad - (length - held), self.context - length) - len(draft)
        if spare <= 0:
            return draft
        first = len(draft) - 1 if draft.is_chain else -1
        return Draft(draft.tokens + (0,) * spare, draft.parents + (first, *range(len(draft), len(draft) + spare - 1)))

    def _keep(self, tokens: Sequence[int], draft: Draft) -> tuple[int, Tensor]:
        """Cut the cache to its common prefix with `tokens` and the first nodes of `draft`.

        Returns the number of remaining positions and the known logits `[rows, vocab]`.
        """
        assert self._logits is not None or not self._held
        shared = common_prefix(self._held, tokens)
        slots: list[int] = []
        node: int | None = -1 if self._held and shared == len(self._held) else None
        children: dict[int | None, list[int]] = {**self._draft.children()}

        def child(node: int | None, token: int) -> int | None:
            return next((kid for kid in children.get(node, ()) if self._draft.tokens[kid] == token), None)

        for token in tokens[shared:]:
            node = child(node, token)
            if node is None:
                break
            slots.append(shared + node)
        if node is None or self._logits is None:  # feed the last token again for its logits
            shared = min(shared, len(tokens) - 1)
            self._engine.keep(shared, slots)
            return shared + len(slots), _NO_LOGITS
        cached: list[int] = [node]  # by 1 + node of `draft`
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            if (node := child(cached[parent + 1], token)) is None:
                break
            cached.append(node)
        slots += [shared + node for node in cached[1:]]
        self._engine.keep(shared, slots)
        return shared + len(slots), self._logits[torch.tensor(cached, device=self._logits.device) + 1]
