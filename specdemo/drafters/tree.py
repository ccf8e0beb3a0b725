"""Draft a tree of a model's continuations: a rejected token may have an accepted sibling.

Siblings are sampled without replacement and their number is fixed in advance, so recursive residuals are exact
(SpecInfer 2305.09781; Sequoia 2402.12374).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.distributions import DenseProbs, without
from specdemo.core.errors import UserError
from specdemo.core.options import OptionSet, option, options
from specdemo.core.origin import MODEL
from specdemo.core.step import Draft
from specdemo.drafters.method import BuildContext, Method
from specdemo.drafters.model import readable

if TYPE_CHECKING:
    from torch import Tensor

    from specdemo.core.sampling import SamplingParams


@dataclass(eq=False)
class TreeDrafter(Drafter):
    """Grow a tree by levels: the `beam` most probable nodes of the last level get up to `width` children each.

    `score(tokens, draft)` returns raw logits `[len(draft) + 1, own_size]`. The budget limits the depth, `nodes` the
    size. At temperature 0 the most probable tokens are point masses.
    """

    score: Callable[[Sequence[int], Draft], Tensor]
    sampling: SamplingParams
    noise: Any
    vocab_size: int
    own_size: int | None = None  # None: all ids
    nodes: int = 12
    width: int = 3
    beam: int = 2

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        from specdemo.core.sampling import fitted

        draft = Draft()
        if not readable(tokens, self.own_size, self.vocab_size):
            return draft
        level, path_probs = [-1], {-1: 1.0}
        depth = 0
        while level and len(draft) < self.nodes and budget.may_extend(depth, None):
            logits = fitted(self.score(tokens, draft), self.vocab_size)
            level = sorted(level, key=lambda node: -path_probs[node])[: self.beam]
            if not budget.may_extend(depth, logits[level[0] + 1]):
                break
            next_level: list[int] = []
            for node in level:
                path = [*tokens, *(draft.tokens[i] for i in draft.path(node))]
                row = self.sampling.process_logits(logits[node + 1][None], [path])
                first = len(draft)
                draft = self._with_children(draft, node, row, len(path))
                for child in range(first, len(draft)):
                    path_probs[child] = path_probs[node] * self._token_prob(draft, child, row)
                    next_level.append(child)
            level, depth = next_level, depth + 1
        return replace(draft, origin=(MODEL,) * len(draft))

    def _with_children(self, draft: Draft, node: int, row: Tensor, position: int) -> Draft:
        import torch

        count = min(self.width, self.nodes - len(draft))
        if self.sampling.temperature == 0:
            children = row[0].topk(count).indices.tolist()
            return Draft(draft.tokens + tuple(children), draft.parents + (node,) * count)
        probs = self.sampling.logits_to_probs(row)[0]
        tokens, parents = list(draft.tokens), list(draft.parents)
        q = list(draft.token_probs or ())
        earlier = None if draft.probs is None else draft.probs.dense()
        distributions = [] if earlier is None else [earlier]
        for _ in range(min(count, int((probs > 0).sum()))):
            token = self.noise.sample(probs, position)
            tokens.append(token)
            parents.append(node)
            q.append(float(probs[token]))
            distributions.append(probs[None])
            probs = without(probs, token)
        return Draft(tuple(tokens), tuple(parents), tuple(q), DenseProbs(torch.cat(distributions)))

    def _token_prob(self, draft: Draft, child: int, row: Tensor) -> float:
        if draft.token_probs is not None:
            return draft.token_probs[child]
        return float(row[0].softmax(-1)[draft.tokens[child]])


@options("Trees")
class TreeOptions(OptionSet):
    """Options of token trees."""

    tree_nodes: int = option(
        12,
        "Nodes per draft",
        "most nodes of a draft of method tree",
        bounds=(1, 256),
        slider=(1, 64, 1),
        limit="max_nodes",
        metavar="N",
    )
    tree_width: int = option(3, "Children per node", bounds=(1, 64), slider=(1, 8, 1), metavar="N")


def _build(context: BuildContext) -> TreeDrafter:
    if context.bridge is not None:
        raise UserError("method tree needs one vocabulary for both models: choose method draft or hybrid")
    model, chosen = context.scorer("drafter"), context.options
    return TreeDrafter(
        model.score,
        context.draft_sampling,
        context.noise("draft"),
        context.vocab_size,
        model.vocab_size,
        nodes=chosen.tree_nodes,
        width=chosen.tree_width,
    )


METHOD = Method(
    name="tree",
    title="a smaller model drafts a tree of probable continuations",
    notes="""\
**A tree** contains several continuations: after a rejected token a sibling may be accepted. Siblings are sampled
without replacement and tested in order against the remaining p, so the text is exact. All nodes share one pass; each
attends to its ancestors. It is fast where additional rows are cheap and the second choice of the drafter is often
right. *SpecInfer 2305.09781; Sequoia 2402.12374.*""",
    build=_build,
    options=(TreeOptions,),
    shape="forest",
    preflight="decoding",
    sampled=True,
    drafter="model",
    shared_vocabulary=True,
)
