"""Targets, and the verifiers of local ones: acceptance rules, and beam search."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from specdemo.core.comparison import ChainComparison, RuleInputs, point_masses
from specdemo.core.decode import DraftLengthPolicy, Verifier
from specdemo.core.distributions import ProbRows, TokenSampler
from specdemo.core.rules import RULES, AcceptanceTest, rejection
from specdemo.core.sampling import Noise, SamplingParams, top_tokens, with_tokens
from specdemo.core.step import Draft, TokenLogprob, Verdict
from specdemo.native import sampling as native


def configured_rule(name: str, *, adjust: bool = True, threshold: float | None = None) -> Callable[..., Verdict]:
    """Return an acceptance rule with its options; `threshold` None: the rule's default."""
    rule = RULES[name]
    apply = rule.apply if adjust else partial(rule.apply, adjust=False)
    if rule.threshold is None:
        return apply
    return partial(apply, threshold=rule.threshold if threshold is None else threshold)


@dataclass(frozen=True, eq=False)
class ModelVerifier:
    """Applies an acceptance rule to the target's distributions.

    `score(tokens, draft)` returns raw target logits `[n + 1, vocab]`. The verdict records the `candidates` most
    probable tokens per row, and `top` tokens of each distribution. `logprobs`: recorded alternatives
    per committed token; None records no log-probabilities. If it `compares`, `score` also takes a `ChainComparison`.
    """

    score: Callable[..., Tensor]
    sampling: SamplingParams
    rule: Callable[[Draft, ProbRows, Any, Any, int], Verdict]
    accept: AcceptanceTest
    correct: TokenSampler
    candidates: int = 1
    top: int = 0
    logprobs: int | None = None
    compares: bool = False

    @property
    def compares_chains(self) -> bool:
        """True if a `ChainComparison` computes what the rule reads of a chain."""
        if not self.compares or self.sampling.needs_paths or not isinstance(self.correct, Noise):
            return False
        return self.sampling.temperature == 0 or self.rule is rejection

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        comparison = (
            ChainComparison(self.sampling, draft, self.correct) if self.compares_chains and draft.is_chain else None
        )
        raw = self.score(tokens, draft) if comparison is None else self.score(tokens, draft, comparison)
        compared = None if comparison is None else comparison.read(raw.float())
        draft = draft.read()
        raw = raw[: len(draft) + 1]  # a device also scores what follows the end of a draft
        logits = self._constrained(raw, tokens, draft) if self.sampling.needs_paths else raw.float()
        inputs = compared or self._rule_inputs(logits, draft)
        count = min(self.candidates, logits.shape[1])
        choices = logits.topk(count).indices.tolist() if count > 1 else [[token] for token in inputs.best]
        verdict = self.rule(inputs.draft, inputs.p, self.accept, self.correct, len(tokens))
        if self.top:
            # Point masses are recorded as their softmax.
            shown = logits.softmax(1) if inputs.probs is None else inputs.probs
            verdict = with_top_tokens(inputs.with_residual(verdict, draft), draft, shown, self.top)
        if self.logprobs is not None:
            verdict = replace(verdict, logprobs=committed_logprobs(raw, draft, verdict, self.logprobs))
        return replace(verdict, choices=tuple(map(tuple, choices)), residual=None)

    def _rule_inputs(self, logits: Tensor, draft: Draft) -> RuleInputs:
        best, largest = native.largest_logits(logits)
        self.sampling.refuse_broken(largest)
        if draft.probs is not None and draft.probs.device != logits.device:
            draft = replace(draft, probs=draft.probs.to(logits.device))
        if self.sampling.temperature == 0:
            return RuleInputs(best, draft, point_masses(best, logits), None)
        probs = self.sampling.logits_to_probs(logits)
        return RuleInputs(best, draft, probs, probs)

    def _constrained(self, raw: Tensor, tokens: Sequence[int], draft: Draft) -> Tensor:
        """Constrain rows, except those after excluded tokens: no text contains them."""
        rows, possible = [self.sampling.constrain(raw[:1], [tokens])[0]], [True]
        for node, parent in enumerate(draft.parents):
            row = raw[node + 1].float()
            possible.append(possible[parent + 1] and float(rows[parent + 1][draft.tokens[node]]) > -torch.inf)
            if possible[-1]:
                path = [*tokens, *(draft.tokens[i] for i in draft.path(node))]
                (row,) = self.sampling.constrain(row[None], [path])
            rows.append(row)
        return torch.stack(rows)


def with_top_tokens(verdict: Verdict, draft: Draft, p: Tensor, count: int) -> Verdict:
    """Record the `count` most probable tokens of p `[n + 1, vocab]`, q and residual, and the ranks of draft tokens.

    All distributions of a position are recorded for the same tokens, including drafted and committed tokens.
    """
    q = None if draft.probs is None else draft.probs.dense()
    target_tops, draft_tops = top_tokens(p, count), [] if q is None else top_tokens(q, count)
    tokens = position_tokens(draft, verdict.token, verdict.accepted)
    rows = [parent + 1 for parent in draft.parents[: len(draft_tops)]]
    for row, top in (*enumerate(target_tops), *zip(rows, draft_tops, strict=True)):
        tokens[row].update(token for token, _ in top.top)
    corrected = None
    if verdict.residual is not None:
        residual, end = verdict.residual[None], (verdict.accepted[-1] if verdict.accepted else -1) + 1
        (corrected,) = with_tokens(top_tokens(residual, count), residual, [tokens[end]])
    return replace(
        verdict,
        rank=tuple(native.token_ranks(p, draft.parents, draft.tokens)) if draft.tokens else (),
        target_top=with_tokens(target_tops, p, tokens),
        draft_top=() if q is None else with_tokens(draft_tops, q, [tokens[row] for row in rows]),
        token_top=corrected,
    )


def committed_logprobs(logits: Tensor, draft: Draft, verdict: Verdict, count: int) -> tuple[TokenLogprob, ...]:
    """Return the log-softmax of raw `logits` `[n + 1, vocab]` at each accepted token and the token of the target."""
    path = verdict.accepted
    tokens = [*(draft.tokens[node] for node in path), *verdict.target_tokens]
    rows = [draft.parents[node] + 1 for node in path] + [(path[-1] if path else -1) + 1] * len(verdict.target_tokens)
    logprobs = logits[rows].float().log_softmax(1)
    values, ids = logprobs.topk(min(count, logprobs.shape[1]))
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return tuple(
        TokenLogprob(value, tuple(zip(*top, strict=True)))
        for value, *top in zip(own.tolist(), ids.tolist(), values.tolist(), strict=True)
    )


def position_tokens(draft: Draft, token: int | None, accepted: Sequence[int]) -> list[set[int]]:
    """Return the drafted and committed tokens that follow each row."""
    tokens: list[set[int]] = [set() for _ in range(len(draft) + 1)]
    for node, parent in enumerate(draft.parents):
        tokens[parent + 1].add(draft.tokens[node])
    if token is not None:
        tokens[(accepted[-1] if accepted else -1) + 1].add(token)
    return tokens


@dataclass(frozen=True)
class Beam:
    """Tokens after the prompt and log-probability, after the length penalty if finished."""

    tokens: tuple[int, ...]
    score: float


@dataclass(eq=False)
class BeamSearch:
    """Beam search following transformers; an instance per prompt.

    The beams form a forest, scored in a single target pass. Tokens that all hypotheses share are committed.

    Finished hypotheses are ranked by log p(text) / length ** `length_penalty`; the search ends when no running beam can
    beat the worst of `num_beams` of them. Candidates are the `top_k` best per beam (0: all). Penalty and bad words of
    `sampling` apply, temperature does not.
    """

    score: Callable[[Sequence[int], Draft], Tensor]
    sampling: SamplingParams
    stop: Collection[int]
    max_tokens: int
    context: int
    num_beams: int = 4
    length_penalty: float = 1.0
    top_k: int = 0
    min_length: int = 0

    def __post_init__(self) -> None:
        self._prompt_length: int | None = None
        self._running = [Beam((), 0.0)]
        self._finished: list[Beam] = []  # hypotheses, best first

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        """Extend every beam by a token and commit the common prefix; `draft` must be empty."""
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        committed = len(tokens) - self._prompt_length
        if self._extend_beams(tokens, committed):
            return Verdict((), None, committed=self._finished[0].tokens[committed:])
        alive = [beam.tokens[committed:] for beam in (*self._running, *self._finished)]
        columns = zip(*alive, strict=False)
        common = next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, alive)))
        return Verdict((), None, committed=alive[0][:common], pending=alive[0][common:])

    def _extend_beams(self, tokens: Sequence[int], committed: int) -> bool:
        assert self._prompt_length is not None
        length = len(self._running[0].tokens) + 1
        candidates = self._candidates(self._log_probs(tokens, committed, length))
        at_limit = length >= min(self.max_tokens, self.context - self._prompt_length)
        ended = [at_limit or beam.tokens[-1] in self.stop for beam in candidates]
        penalty = length**self.length_penalty
        self._finished += [
            Beam(beam.tokens, beam.score / penalty)
            for beam, end in zip(candidates[: self.num_beams], ended, strict=False)
            if end
        ]
        self._finished = sorted(self._finished, key=lambda beam: -beam.score)[: self.num_beams]
        self._running = [beam for beam, end in zip(candidates, ended, strict=True) if not end][: self.num_beams]
        if not self._running:
            return True
        full = len(self._finished) == self.num_beams
        return full and self._running[0].score / penalty <= self._finished[-1].score

    def _log_probs(self, tokens: Sequence[int], committed: int, length: int) -> Tensor:
        """Log-probabilities `[beams, vocab]` of the next token; -inf if excluded."""
        forest, leaves = self._forest(committed)
        logits = self.score(tokens, forest)[torch.tensor(leaves) + 1]
        paths = [[*tokens, *beam.tokens[committed:]] for beam in self._running]
        log_probs = self.sampling.process_logits(logits.float().log_softmax(1), paths)
        if length <= self.min_length:
            known = [token for token in self.stop if token < log_probs.shape[1]]
            stop = torch.tensor(known, dtype=torch.int64, device=log_probs.device)
            log_probs = log_probs.index_fill(1, stop, -torch.inf)
        if 0 < self.top_k < log_probs.shape[1]:
            log_probs = log_probs.masked_fill(log_probs < log_probs.topk(self.top_k).values[:, -1:], -torch.inf)
        return log_probs

    def _candidates(self, log_probs: Tensor) -> list[Beam]:
        """Best extensions: at least `num_beams` remain if every stop token ends every beam."""
        scores = log_probs.new_tensor([beam.score for beam in self._running])
        sums = (log_probs + scores[:, None]).flatten()
        best = sums.topk(min(len(sums), max(2, 1 + len(self.stop)) * self.num_beams))
        vocab = log_probs.shape[1]
        return [
            Beam((*self._running[index // vocab].tokens, index % vocab), score)
            for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            if score > -torch.inf
        ]

    def _forest(self, committed: int) -> tuple[Draft, list[int]]:
        """Beams after `committed` tokens as a forest in level order, and each beam's last node.

        Only the last level is new, so a cache processes a node per beam.
        """
        nodes: dict[tuple[int, int], int] = {}  # maps (parent, token) to a node
        leaves = [-1] * len(self._running)
        for i in range(committed, len(self._running[0].tokens)):
            for b, beam in enumerate(self._running):
                leaves[b] = nodes.setdefault((leaves[b], beam.tokens[i]), len(nodes))
        return Draft(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes)), leaves


@dataclass(frozen=True)
class VerifierInputs:
    """Inputs for the verifier of a run."""

    options: Any  # values of all options, by name
    sampling: SamplingParams
    policy: DraftLengthPolicy
    target_cache: Any | None  # cached model of the target, None outside this process
    draft_caches: Sequence[Any]
    candidates: int  # target tokens that a verdict must contain
    accept: Any  # noise of acceptance
    correct: Any  # noise of corrections; shared with the drafter if the rule shares noise
    logprobs: int | None  # see `ModelVerifier`
    open: Callable[[Any], Any]  # returns a cached model, closed at the end of the run
    on_close: Callable[[Callable[[], object]], object]  # registers a call for the end of the run


class Target(Protocol):
    """Model whose distribution the text follows."""

    @property
    def name(self) -> str:
        """Name in messages."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop(self) -> Collection[int]:
        """Tokens that end a text."""

    @property
    def opening(self) -> Sequence[int]:
        """First tokens of a text whose prompt an encoder reads."""

    @property
    def encoder(self) -> bool:
        """True if an encoder reads the prompt."""

    @property
    def context(self) -> int:
        """Longest text, in tokens."""

    @property
    def chains_only(self) -> str:
        """Return the reason why forests cannot be verified, or an empty string."""

    @property
    def device(self) -> torch.device | None:
        """Device in this process, if any."""

    @property
    def environment(self) -> Mapping[str, Any]:
        """Return the entries of a trace header."""

    @property
    def pass_costs(self) -> Mapping[int, float] | None:
        """Cost of passes by number of rows, in AR steps; None if they are not measured."""

    @property
    def weight_bytes(self) -> int: ...

    def bit_equal(self, longest_draft: int | None, length: int) -> bool:
        """Return True if rows have the same bits in passes of any size.

        `longest_draft`: of chains, None for other drafts. `length`: tokens of the text. Beyond the compared sizes the
        result is False.
        """

    def open_cache(self, open: Callable[..., Any], taps: tuple[int, ...]) -> Any | None:
        """Return the cached model of a run by `open(target, role, pad=..., taps=...)`, None outside this process.

        `taps`: hidden states that the run needs.
        """

    def verifier(self, inputs: VerifierInputs) -> Verifier:
        """Return the verifier of a run."""

    def close(self) -> None:
        """Close the connection, if any."""
