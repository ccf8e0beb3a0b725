"""Draft a tree of continuations by a model or head: a rejected token may have an accepted sibling.

Siblings are sampled without replacement and their number is fixed in advance, so recursive residuals are exact
(SpecInfer 2305.09781; Sequoia 2402.12374).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.distributions import without
from specdemo.core.errors import UserError
from specdemo.core.options import OptionSet, option, options
from specdemo.core.step import Draft, Origin
from specdemo.drafters.chain import DraftScorer, DraftVocabulary, ModelScorer
from specdemo.drafters.method import BuildContext, Method

if TYPE_CHECKING:
    from torch import Tensor

    from specdemo.core.sampling import SamplingParams


@dataclass(eq=False)
class TreeDrafter(Drafter):
    """Grow a tree by levels: the `beam` most probable nodes of the last level get up to `width` children each.

    The budget limits the depth, `nodes` the size. At temperature 0 the most probable tokens are point masses.
    """

    scorer: DraftScorer
    sampling: SamplingParams
    noise: Any
    vocab_size: int
    nodes: int = 12
    width: int = 3
    beam: int = 2

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        if budget.paused:
            return Draft()
        budget = budget.at_most(self.scorer.longest_draft(tokens))
        tree = _GrowingTree(self.scorer, self.vocab_size, self.sampling, self.noise)
        level, depth = [-1], 0
        while level and len(tree.tokens) < self.nodes and budget.may_extend(depth, None):
            level = sorted(level, key=lambda node: -tree.path_probs[node])[: self.beam]
            draft = Draft(tuple(tree.tokens), tuple(tree.parents))
            scored = self.scorer.score_nodes(tokens, draft, level)
            if scored is None or not budget.may_extend(depth, scored[0]):
                break
            first = len(draft)
            for node, logits in zip(level, scored, strict=True):
                path = [*tokens, *(draft.tokens[i] for i in draft.path(node))]
                tree.add_children(node, logits, path, min(self.width, self.nodes - len(tree.tokens)))
            level, depth = [*range(first, len(tree.tokens))], depth + 1
        return tree.draft(self.scorer.origin)


class _GrowingTree:
    """Nodes so far and the distributions they were sampled from."""

    def __init__(self, scorer: DraftScorer, vocab_size: int, sampling: SamplingParams, noise: Any) -> None:
        self._scorer, self._vocab_size = scorer, vocab_size
        self._sampling, self._noise = sampling, noise
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.path_probs = {-1: 1.0}  # q of the path to each node
        self._q: list[float] = []
        self._rows: list[Tensor] = []

    @property
    def _vocabulary(self) -> DraftVocabulary:
        return DraftVocabulary(self._scorer.ids, self._vocab_size)

    def add_children(self, node: int, logits: Tensor, path: Sequence[int], count: int) -> None:
        """Add up to `count` different children of `node` after the text `path`."""
        processed = self._vocabulary.process(self._sampling, logits, path)
        if processed is None:
            return
        if self._sampling.temperature == 0:
            count = min(count, int((processed > -inf).sum()))
            chosen, probs = processed.topk(count), processed.softmax(-1)
            for index in chosen.indices.tolist():
                self._add(node, self._vocabulary.token(index), float(probs[index]))
            return
        values = self._sampling.logits_to_probs(processed[None])[0]
        for _ in range(min(count, int((values > 0).sum()))):
            token = self._vocabulary.sample(values, self._noise, len(path))
            index = self._vocabulary.index(token)
            self._q.append(float(values[index]))
            self._rows.append(values)
            self._add(node, token, self._q[-1])
            values = without(values, index)

    def _add(self, node: int, token: int, q: float) -> None:
        self.path_probs[len(self.tokens)] = self.path_probs[node] * q
        self.tokens.append(token)
        self.parents.append(node)

    def draft(self, origin: Origin) -> Draft:
        tokens, parents = tuple(self.tokens), tuple(self.parents)
        origins = (origin,) * len(tokens)
        if not self._rows:
            return Draft(tokens, parents, origin=origins)
        return Draft(tokens, parents, tuple(self._q), self._vocabulary.rows(self._rows), origins)


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
    sampling, noise = context.draft_sampling, context.noise("draft")
    chosen = context.options
    scorer: DraftScorer | None = context.head()
    if scorer is None:
        model = context.scorer("drafter")
        scorer = ModelScorer(model.score, context.vocab_size, model.vocab_size, model.context)
    return TreeDrafter(scorer, sampling, noise, context.vocab_size, chosen.tree_nodes, chosen.tree_width)


TREE = Method(
    name="tree",
    title="a smaller model or a head drafts a tree of probable continuations",
    notes="""\
**A tree** contains several continuations: after a rejected token a sibling may be accepted. Siblings are sampled
without replacement and tested in order against the remaining p, so the text is exact. All nodes share one pass; each
attends to its ancestors. It is fast where additional rows are cheap and the second choice of the drafter is often
right. With a head it is the dynamic tree of EAGLE-2, sampled, or the tree of Medusa.
*SpecInfer 2305.09781; Sequoia 2402.12374; EAGLE-2 2406.16858.*""",
    build=_build,
    options=(TreeOptions,),
    shape="forest",
    sampled=True,
    drafter="model",
    accepts_head=True,
    shared_vocabulary=True,
)
