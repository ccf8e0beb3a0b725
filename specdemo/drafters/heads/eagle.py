"""EAGLE-3: a head of one layer drafts a chain from hidden states of the target (2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.distributions import DenseProbs, SparseProbs, SparseRow
from specdemo.core.errors import UserError
from specdemo.core.origin import HEAD
from specdemo.core.step import Draft
from specdemo.drafters.method import BuildContext, Method

if TYPE_CHECKING:
    from torch import Tensor

    from specdemo.core.sampling import ChainSampler, SamplingParams

_EXCLUDED = -1e30  # finite, since a text may exclude all of a draft vocabulary


class DraftingHead(Protocol):
    """Interface of a head with the rows of a text."""

    @property
    def ids(self) -> Tensor | None:
        """Target ids of the logits `[size]`, ascending; None: all."""

    def longest_draft(self, tokens: Sequence[int]) -> int:
        """Return the most draft tokens after `tokens`."""

    def start(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the logits `[size]` after `tokens`, None without hidden states."""

    def step(self, token: int) -> Tensor:
        """Return the logits `[size]` after a draft token."""

    def sample_chain(
        self, tokens: Sequence[int], sampler: ChainSampler, count: int, threshold: float
    ) -> list[int] | None:
        """Draft in one call; return None if impossible."""


@dataclass(eq=False)
class HeadDrafter(Drafter):
    """Sample a chain from the head, with the target's sampling parameters over the draft vocabulary."""

    head: DraftingHead
    sampling: SamplingParams
    noise: Any
    vocab_size: int

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        budget = budget.at_most(self.head.longest_draft(tokens))
        draft = self._propose_chain(tokens, budget)
        if draft is None:
            draft = self._propose_tokens(tokens, budget)
        return replace(draft, origin=(HEAD,) * len(draft))

    def _propose_chain(self, tokens: Sequence[int], budget: DraftBudget) -> Draft | None:
        from specdemo.core.sampling import ChainSampler

        limits = budget.chain_limits
        if self.sampling.needs_paths or limits is None or not limits[0]:
            return None
        sampler = ChainSampler(self.sampling, self.noise, len(tokens), self.vocab_size, self.head.ids)
        drafted = self.head.sample_chain(tokens, sampler, *limits)
        return None if drafted is None else sampler.chain(drafted)

    def _propose_tokens(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        path, rows = list(tokens), []
        q: list[float] = []
        logits = None
        while budget.may_extend(n := len(path) - len(tokens), None):
            logits = self.head.step(path[-1]) if n else self.head.start(path)
            if logits is None or not budget.may_extend(n, logits):
                break
            processed = self._processed(logits, path)
            if processed is None:
                break
            if self.sampling.temperature == 0:
                path.append(self._token(int(processed[0].argmax())))
                continue
            row = self.sampling.logits_to_probs(processed)[0]
            token = self._sample(row, len(path))
            path.append(token)
            rows.append(row)
            q.append(float(row[self._index(token)]))
        new = tuple(path[len(tokens) :])
        return Draft.chain(new, tuple(q), self._distributions(rows)) if rows else Draft.chain(new)

    def _processed(self, logits: Tensor, path: Sequence[int]) -> Tensor | None:
        """Return processed logits `[1, size]`, None if they exclude all tokens."""
        logits, ids = logits.float(), self.head.ids
        if self.sampling.needs_paths and ids is not None:
            logits = logits.new_full((self.vocab_size,), _EXCLUDED).index_put_((ids,), logits)
            logits = self.sampling.constrain(logits[None], [path])[0, ids]
        elif self.sampling.needs_paths:
            logits = self.sampling.constrain(logits[None], [path])[0]
        best = float(logits.max())
        if best <= _EXCLUDED:
            return None
        self.sampling.refuse_broken([best])
        return logits[None]

    def _token(self, index: int) -> int:
        return index if self.head.ids is None else int(self.head.ids[index])

    def _index(self, token: int) -> int:
        import torch

        return token if self.head.ids is None else int(torch.searchsorted(self.head.ids, token))

    def _sample(self, row: Tensor, position: int) -> int:
        if self.head.ids is None:
            return self.noise.sample(row, position)
        return self.noise.sample_sparse(SparseRow(self.head.ids, row, self.vocab_size), position)

    def _distributions(self, rows: Sequence[Tensor]) -> DenseProbs | SparseProbs:
        import torch

        values = torch.stack(list(rows))
        if self.head.ids is None:
            return DenseProbs(values)
        return SparseProbs(self.head.ids.expand(len(rows), -1), values, self.vocab_size)


def build_head_drafter(context: BuildContext) -> HeadDrafter:
    head = context.head()
    if head is None:
        raise UserError("this method needs a head: set head to a directory or Hugging Face id")
    return HeadDrafter(head, context.draft_sampling, context.noise("draft"), context.vocab_size)


METHOD = Method(
    name="eagle",
    title="a head on hidden states of the target drafts (EAGLE-3)",
    notes="""\
**EAGLE-3** drafts with a single layer, which combines hidden states of three layers of the target with the next token.
The states of drafted tokens are the head's own. Tokens are sampled from q over a draft vocabulary and verified by the
rule, so the text is exact for any head. A draft token costs a few percent of a target pass.
*EAGLE 2401.15077; EAGLE-3 2503.01840.*""",
    build=build_head_drafter,
    sampled=True,
    drafter="head",
    local_target=True,
    decoder_only=True,
    preflight="decoding",
)
