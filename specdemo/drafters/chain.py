"""Draft a chain of tokens by a smaller model, by some layers of the target, or by a head on its hidden states.

A drafter with another vocabulary is re-encoded. A text has many tokenisations, so the distribution over target tokens
is unknown. Verification as point masses is exact, because drafts depend only on committed text and independent random
numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.distributions import DenseProbs, SparseProbs, SparseRow
from specdemo.core.errors import UserError
from specdemo.core.options import OptionRule, OptionSet, option, options
from specdemo.core.step import MODEL, Draft, Origin, Step
from specdemo.drafters.method import BuildContext, Method

if TYPE_CHECKING:
    from torch import Tensor

    from specdemo.core.sampling import ChainSampler, SamplingParams, UnreadDraft


_EXCLUDED = -1e30  # finite, since a text may exclude all of a draft vocabulary


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Target tokens `ids` `[size]` of the logits; None: all `vocab_size` tokens."""

    ids: Tensor | None
    vocab_size: int

    def process(self, sampling: SamplingParams, logits: Tensor, path: Sequence[int]) -> Tensor | None:
        """Process raw logits `[size]` after the text `path`; return None if that excludes all tokens."""
        logits = logits.float()
        if sampling.needs_paths and self.ids is not None:
            logits = logits.new_full((self.vocab_size,), _EXCLUDED).index_put_((self.ids,), logits)
            logits = sampling.constrain(logits[None], [path])[0, self.ids]
        elif sampling.needs_paths:
            logits = sampling.constrain(logits[None], [path])[0]
        best = float(logits.max())
        if self.ids is not None and best <= _EXCLUDED:
            return None
        sampling.refuse_broken([best])
        return logits

    def token(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])

    def index(self, token: int) -> int:
        return token if self.ids is None else int((self.ids == token).nonzero())

    def sample(self, values: Tensor, noise: Any, position: int) -> int:
        """Sample a token from the probabilities `values` `[size]`."""
        if self.ids is None:
            return noise.sample(values, position)
        return noise.sample_sparse(SparseRow(self.ids, values, self.vocab_size), position)

    def rows(self, values: Sequence[Tensor]) -> DenseProbs | SparseProbs:
        """Return the distributions of a draft."""
        import torch

        stacked = torch.stack(list(values))
        if self.ids is None:
            return DenseProbs(stacked)
        return SparseProbs(self.ids, stacked, self.vocab_size)


class DraftScorer(Protocol):
    """Interface of a model or head that drafts after the text of a run."""

    @property
    def origin(self) -> Origin:
        """Origin of its tokens."""

    @property
    def ids(self) -> Tensor | None:
        """Target ids of the logits `[size]` since `start`; None: all."""

    @property
    def confidence(self) -> float | None:
        """Return the chance that the token of the last logits is accepted, predicted before it is chosen, if known."""

    def longest_draft(self, tokens: Sequence[int]) -> int:
        """Return the most draft tokens after `tokens`."""

    def start(self, tokens: Sequence[int]) -> Tensor | None:
        """Return raw logits `[size]` after `tokens`; None if they have no drafts yet."""

    def step(self, token: int) -> Tensor:
        """Return raw logits `[size]` after a draft token."""

    def score_nodes(self, tokens: Sequence[int], draft: Draft, nodes: Sequence[int]) -> Sequence[Tensor] | None:
        """Return raw logits `[size]` after each of `nodes` of a tree, whose parents were scored, or None like `start`.

        Node -1 is the text.
        """

    def sample_chain(
        self, tokens: Sequence[int], sampler: ChainSampler, limits: Sequence[float]
    ) -> list[int] | UnreadDraft | None:
        """Draft up to `len(limits)` tokens in a single call; return None if impossible.

        The draft ends before token i if the product of the largest probabilities (of raw logits) up to it is below
        `limits[i]`.
        """

    def expect(self) -> None:
        """Prepare for a draft while the caller does other work."""


@dataclass(eq=False)
class ChainDrafter(Drafter):
    """Sample a chain with the target's sampling parameters over the scorer's tokens (2211.17192, Algorithm 1)."""

    scorer: DraftScorer
    sampling: SamplingParams
    noise: Any
    vocab_size: int

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        longest, limits = self.scorer.longest_draft(tokens), budget.chain_limits
        if limits is not None:
            limits = limits[:longest]
            if not limits or limits[0] > 1:
                return Draft()
            draft = self._propose_at_once(tokens, limits)
            if draft is not None:
                return draft
        return self._propose_by_token(tokens, budget.at_most(longest))

    def observe(self, step: Step) -> None:
        """Expect a further draft after a draft."""
        if self.scorer.origin in step.draft.origin:
            self.scorer.expect()

    def _propose_at_once(self, tokens: Sequence[int], limits: Sequence[float]) -> Draft | None:
        from specdemo.core.sampling import ChainSampler

        if self.sampling.needs_paths:
            return None
        sampler = ChainSampler(self.sampling, self.noise, len(tokens), self.vocab_size, self.scorer.origin)
        drafted = self.scorer.sample_chain(tokens, sampler, limits)
        return drafted if drafted is None or isinstance(drafted, Draft) else sampler.chain(drafted)

    def _propose_by_token(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        import torch

        path, distributions = list(tokens), []
        q: list[Tensor] = []
        confidences: list[float] = []
        while budget.may_extend(n := len(path) - len(tokens), None):
            logits = self.scorer.step(path[-1]) if n else self.scorer.start(path)
            if logits is None or not self._continues(n, logits, budget, confidences):
                break
            vocabulary = DraftVocabulary(self.scorer.ids, self.vocab_size)
            processed = vocabulary.process(self.sampling, logits, path)
            if processed is None:
                break
            if self.sampling.temperature == 0:
                path.append(vocabulary.token(int(processed.argmax())))
                continue
            probs = self.sampling.logits_to_probs(processed[None])[0]
            path.append(vocabulary.sample(probs, self.noise, len(path)))
            distributions.append(probs)
            q.append(probs[vocabulary.index(path[-1])])
        new = tuple(path[len(tokens) :])
        origin = (self.scorer.origin,) * len(new)
        if confidences:
            origin = tuple(replace(self.scorer.origin, confidence=round(value, 3)) for value in confidences[: len(new)])
        if not distributions:
            return Draft.chain(new, origin=origin)
        return Draft.chain(new, tuple(torch.stack(q).tolist()), vocabulary.rows(distributions), origin)

    def _continues(self, n: int, logits: Tensor, budget: DraftBudget, confidences: list[float]) -> bool:
        """Return True if token n may be drafted; append its confidence, which precedes the choice of the token."""
        if (confidence := self.scorer.confidence) is None or (limits := budget.chain_limits) is None:
            return budget.may_extend(n, logits)
        confidences.append(confidence)
        return prod(confidences) >= limits[n]


@dataclass(eq=False)
class UniversalDrafter(Drafter):
    """Re-encode drafts of `inner` as chains of point masses.

    `read(tokens)` encodes committed text in drafter tokens; `write(tokens, new)` re-encodes drafter tokens `new` as
    target tokens after `tokens`. `context` is the drafter's context length. The budget limits both.
    """

    inner: Drafter
    read: Callable[[Sequence[int]], list[int]]
    write: Callable[[Sequence[int], Sequence[int]], list[int]]
    context: int

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        prefix = self.read(tokens)
        available = self.context - len(prefix)
        if not prefix or available < 1:
            return Draft()
        new = self.write(tokens, self.inner.propose(prefix, budget.at_most(available)).tokens)[: budget.limit]
        return Draft.chain(tuple(new), origin=(MODEL,) * len(new))


ScoreDraft = Callable[[Sequence[int], Draft], "Tensor"]
ExtendText = Callable[[Sequence[int], int, "ChainSampler", Sequence[float]], "list[int] | UnreadDraft | None"]


@dataclass(eq=False)
class ModelScorer:
    """Logits of a model for the target's `vocab_size` tokens.

    `model(tokens, draft)` returns raw logits `[len(draft) + 1, own_size]`. Ids unknown to the target are masked before
    the softmax; ids unknown to the drafter get no mass and, in the text, prevent drafts, like texts beyond `context`.
    `extend`: see `CachedModel`.
    """

    model: ScoreDraft
    vocab_size: int
    own_size: int | None = None  # None: all ids
    context: int = sys.maxsize
    extend: ExtendText | None = None
    origin = MODEL
    ids = None
    confidence = None

    def longest_draft(self, tokens: Sequence[int]) -> int:
        """Return the most draft tokens after `tokens`, of which the last is not fed."""
        if self.own_size is not None and self.own_size < self.vocab_size and max(tokens) >= self.own_size:
            return 0
        return max(0, self.context - len(tokens) + 1)

    def logits(self, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Return raw logits `[len(draft) + 1, vocab_size]`."""
        from specdemo.core.sampling import fitted

        return fitted(self.model(tokens, draft), self.vocab_size)

    def start(self, tokens: Sequence[int]) -> Tensor:
        self._path = list(tokens)
        return self.logits(self._path, Draft())[0]

    def step(self, token: int) -> Tensor:
        self._path.append(token)
        return self.logits(self._path, Draft())[0]

    def score_nodes(self, tokens: Sequence[int], draft: Draft, nodes: Sequence[int]) -> list[Tensor]:
        logits = self.logits(tokens, draft)
        return [logits[node + 1] for node in nodes]

    def sample_chain(
        self, tokens: Sequence[int], sampler: ChainSampler, limits: Sequence[float]
    ) -> list[int] | UnreadDraft | None:
        return None if self.extend is None else self.extend(tokens, len(limits), sampler, limits)

    def expect(self) -> None:
        """Ignore preparations."""


class ModelDrafter(ChainDrafter):
    """Sample a chain from a model, see `ModelScorer`."""

    def __init__(
        self,
        score: ScoreDraft,
        sampling: SamplingParams,
        noise: Any,
        vocab_size: int,
        own_size: int | None = None,
        extend: ExtendText | None = None,
        context: int = sys.maxsize,
    ) -> None:
        super().__init__(ModelScorer(score, vocab_size, own_size, context, extend), sampling, noise, vocab_size)


def build_model_drafter(context: BuildContext) -> ModelDrafter | UniversalDrafter:
    model = context.scorer("drafter")
    if context.bridge is None:
        sampling, noise = context.draft_sampling, context.noise("draft")
        sizes = context.vocab_size, model.vocab_size
        return ModelDrafter(model.score, sampling, noise, *sizes, model.extend, model.context)
    # Point masses: the most probable token is accepted more often than a sampled one.
    sampling, noise = replace(context.drafter_sampling, temperature=0), context.noise("draft", shared=False)
    inner = ModelDrafter(model.score, sampling, noise, model.vocab_size, extend=model.extend)
    return UniversalDrafter(inner, context.bridge.read, context.bridge.write, model.context)


DRAFT = Method(
    name="draft",
    title="a smaller model drafts, the target verifies",
    notes="""\
**A draft model** samples up to γ tokens from its distribution q. The target scores all of them in one pass. Token x is
accepted with probability min(1, p(x)/q(x)). The first rejected token is replaced by a sample from norm(max(p − q, 0)),
so the text follows p exactly. Speed-up is (1 − α^(γ+1)) / ((1 − α)(γc + 1)). It is high for a large
α = accepted/tested, which the mean overlap β = Σ min(p, q) estimates with less noise, and a small cost ratio c.
*Leviathan et al. 2211.17192; Chen et al. 2302.01318.*""",
    build=build_model_drafter,
    sampled=True,
    drafter="model",
    gates=True,
)


def head_method(name: str, title: str, notes: str) -> Method:
    """Return the entry of the method of heads of kind `name`."""
    return Method(
        name=name,
        title=title,
        notes=notes,
        build=partial(build_head_drafter, kind=name),
        sampled=True,
        drafter="head",
        local_target=True,
        decoder_only=True,
    )


def build_head_drafter(context: BuildContext, kind: str | None = None) -> ChainDrafter:
    """Build the drafter of a head. Raises `UserError` for a head of another kind than `kind`, if given."""
    head = context.head()
    if head is None:
        raise UserError("this method needs a head: set head to a directory or Hugging Face id")
    if kind is not None and head.kind != kind:
        raise UserError(f"the head is not of kind {kind}: choose method {head.kind} or hybrid")
    return ChainDrafter(head, context.draft_sampling, context.noise("draft"), context.vocab_size)


HEAD_METHODS = (
    head_method(
        name="eagle",
        title="a head on hidden states of the target drafts (EAGLE)",
        notes="""\
**EAGLE** drafts with a single layer, which combines hidden states of the target with the next token: the final state
(EAGLE-1 and 2), or those of three layers (EAGLE-3). The states of drafted tokens are the head's own. Tokens are sampled
from q over a draft vocabulary and verified by the rule, so the text is exact for any head. A draft token costs a few
percent of a target pass on a CPU, half a pass of a small target on a GPU. With method tree the head drafts the tree of
EAGLE-2.
*EAGLE 2401.15077; EAGLE-2 2406.16858; EAGLE-3 2503.01840.*""",
    ),
    head_method(
        name="medusa",
        title="several heads on one hidden state of the target draft a token each",
        notes="""\
**Medusa** adds heads to the target's final state. Head i drafts the token i positions ahead without the tokens before
it, so a draft needs no drafting steps, and acceptance falls quickly with i. A chain sampled from the heads has a known
q, so the ordinary rule keeps the text exact; rule typical is the lossy rule of the paper. With method tree the heads
draft a tree. *Medusa 2401.10774.*""",
    ),
    head_method(
        name="block",
        title="a head on hidden states of the target drafts several tokens in one pass",
        notes="""\
**A DFlash or DSpark head** computes the states of all draft positions in one pass, so a draft costs about as much as
one token of EAGLE-3. The Markov head of DSpark adds the token before to the logits of a position, which makes q a
chain: tokens are sampled from q and verified by the rule, so the text is exact for any head. It predicts the chance
that a token is accepted before it is chosen; policy *path* ends the draft by these confidences.
*DFlash 2602.06036, DSpark 2607.05147.*""",
    ),
)


_ONE_SELECTION = OptionRule(
    ("exit_layer",),
    lambda chosen, name: chosen.exit_layer is not None and chosen.skip_layers,
    "exit_layer and skip_layers both select the layers",
    "give either exit_layer or skip_layers",
)


@options("Self-speculation", rules=(_ONE_SELECTION,))
class SelfOptions(OptionSet):
    """Options of self-speculation, which select the layers that draft."""

    exit_layer: int | None = option(
        None,
        "Number of layers (0: half of them)",
        "keep the first K layers (default: half)",
        bounds=(1, 1 << 10),
        metavar="K",
    )
    skip_layers: tuple[int, ...] = option(
        (), "Skipped layers", "skip this layer; may be repeated", flag="--skip-layer", metavar="I"
    )


def build_self_drafter(context: BuildContext) -> ModelDrafter:
    chosen = context.options

    def layers(count: int) -> Sequence[int]:
        if chosen.skip_layers:
            return [i for i in range(count) if i not in chosen.skip_layers]
        return range(count // 2 if chosen.exit_layer is None else chosen.exit_layer)

    model = context.scorer("target", layers)
    noise = context.noise("draft")
    return ModelDrafter(model.score, context.draft_sampling, noise, context.vocab_size, model.vocab_size, model.extend)


SELF = Method(
    name="self",
    title="the target drafts with some of its layers skipped",
    notes="""\
**Self-speculation** drafts with the target and skips some of its layers. It needs no second model, tokenizer or
weights. Rejection sampling makes it exact, as for any draft distribution. Models trained for early exit gain much,
other models little. *Draft & Verify 2309.08168; LayerSkip 2404.16710.*""",
    build=build_self_drafter,
    options=(SelfOptions,),
    sampled=True,
    local_target=True,
    decoder_only=True,
)
