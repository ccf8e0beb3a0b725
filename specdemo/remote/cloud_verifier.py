"""One round as the cloud decides it: the loop's own `ModelVerifier`, over what came along the wire.

Chance is keyed by place in the text, not by what was drawn before: a round that is decided again, by another process
too, has the same answer. Knows laws and messages; knows no models, contexts or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.core.rules import RULES
from specdemo.core.sampling import Noise, SharedNoise
from specdemo.core.step import Draft, RowNeeded, TopTokens, Verdict
from specdemo.core.verifier import ModelVerifier
from specdemo.remote.protocol import TopTokensMessage, VerifyConfig, VerifyMetrics, VerifyRequest, VerifyResponse

Score = Callable[[Sequence[int], Draft], Tensor]
Sources = Callable[[VerifyConfig, int], tuple[Any, Any]]  # settings and place -> where acceptance and tokens come from


def keyed(settings: VerifyConfig, place: int) -> tuple[Any, Any]:
    """Noise for the round whose first token stands at `place`, the same whenever it is asked for."""
    accept = Noise(settings.seed, f"accept/{place}")
    if RULES[settings.rule].shares_noise:
        return accept, SharedNoise(settings.seed)
    return accept, Noise(settings.seed, f"correct/{place}")


class SentRows:
    """The drafter's laws as far as they were sent; asking for another raises `RowNeeded`."""

    def __init__(self, rows: Mapping[int, Tensor]) -> None:
        self._rows = rows

    def __getitem__(self, node: int) -> Tensor:
        if node not in self._rows:
            raise RowNeeded(node)
        return self._rows[node]


class ScalarRows:
    """All that is known of a node's law is its token's share: p(v) - [v = y] q is left (practice guide, 3.1).

    Exact for point masses only: of a sampled draft the rest of q's mass is missing.
    """

    def __init__(self, draft: Draft, vocab_size: int, device: torch.device) -> None:
        self._draft, self._vocab_size, self._device = draft, vocab_size, device

    def __getitem__(self, node: int) -> Tensor:
        row = torch.zeros(self._vocab_size, device=self._device)
        row[self._draft.tokens[node]] = (self._draft.token_probs or ())[node]
        return row


def known_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that the model has not."""
    if max(tokens, default=0) >= vocab_size:
        raise UserError(f"a token is not among the model's {vocab_size:,} ids: send ids of its own tokenizer")


def draft_of(round: VerifyRequest, vocab_size: int, device: torch.device) -> Draft:
    """The draft that came along the wire. Raises `UserError` for one that cannot be."""
    n = len(round.draft_tokens)
    if round.k != n:
        raise UserError(f"k is {round.k} and {n} tokens were drafted: send as many as k says")
    for name in ("parents", "q_token_probs", "hard_mask"):
        value = getattr(round, name)
        if value is not None and len(value) != n:
            raise UserError(f"{name} has {len(value)} entries for {n} drafted tokens: send one for each")
    known_ids([*round.draft_tokens, *round.tokens], vocab_size)
    parents = round.parents if round.parents is not None else list(range(-1, n - 1))
    if any(parent >= node for node, parent in enumerate(parents)):
        raise UserError("a node's parent must come before it: send the draft from its root down")
    q = None if round.q_token_probs is None else tuple(round.q_token_probs)
    draft = Draft(tuple(round.draft_tokens), tuple(parents), q)
    if q is None:
        return draft
    if round.rows is None:
        return Draft(draft.tokens, draft.parents, q, ScalarRows(draft, vocab_size, device))
    if any(row.node >= n for row in round.rows):
        raise UserError(f"a row belongs to no node of the {n} drafted: send rows of the draft")
    rows = {row.node: row.probs(vocab_size).to(device) for row in round.rows}
    return Draft(draft.tokens, draft.parents, q, SentRows(rows))


def target(settings: VerifyConfig, score: Score, place: int, sources: Sources = keyed, **shown: int) -> ModelVerifier:
    """The judge of a round at `place`. Raises `UserError` for a rule that there is not, or one asked for too much."""
    if settings.rule not in RULES:
        raise UserError(f"unknown rule {settings.rule!r}: known are {', '.join(RULES)}")
    rule = RULES[settings.rule]
    apply: Any = rule.apply
    if not settings.adjust:
        if not rule.adjusts:
            raise UserError(f"rule {settings.rule} has no sample adjustment to skip: choose rule rejection")
        apply = partial(apply, adjust=False)
    if rule.threshold is not None:
        apply = partial(apply, threshold=rule.threshold if settings.threshold is None else settings.threshold)
    accept, correct = sources(settings, place)
    return ModelVerifier(score, settings.sampling, apply, accept, correct, **shown)


def decide(
    round: VerifyRequest,
    tokens: Sequence[int],
    draft: Draft,
    settings: VerifyConfig,
    score: Score,
    sources: Sources = keyed,
) -> VerifyResponse:
    """The answer to `round`, whose draft is `draft` and continues `tokens`."""
    verifier = target(settings, score, len(tokens), sources, candidates=round.candidates, top=round.top)
    try:
        verdict = verifier.verify(tokens, draft)
    except RowNeeded as wanted:
        return VerifyResponse(epoch=round.epoch, round=round.round, accepted_len=0, wants=wanted.node)
    return _answer(round, draft, verdict)


def _answer(round: VerifyRequest, draft: Draft, verdict: Verdict) -> VerifyResponse:
    tested = [node for node, beta in enumerate(verdict.beta) if beta is not None]
    draws = [draw for node in tested if (draw := verdict.draw[node]) is not None]
    q = draft.token_probs or (1.0,) * len(draft)
    alphas = [min(1.0, verdict.p[node] / q[node]) if q[node] else 0.0 for node in tested]
    last = verdict.accepted[-1] if verdict.accepted else -1
    rejected = last in draft.parents
    return VerifyResponse(
        epoch=round.epoch,
        round=round.round,
        accepted_len=len(verdict.accepted),
        correction=verdict.token if rejected else None,
        bonus=None if rejected else verdict.token,
        accepted=None if round.parents is None else list(verdict.accepted),
        tested=None if round.parents is None else tested,
        p=list(verdict.p),
        draws=draws if draws and len(draws) == len(tested) else None,
        choices=[list(row) for row in verdict.choices],
        laws=[
            TopTokensMessage(entropy=one.entropy, ids=[t for t, _ in one.top], p=[p for _, p in one.top])
            for one in verdict.target_top
        ]
        or None,
        metrics=VerifyMetrics(
            alpha_mean=sum(alphas) / len(alphas) if alphas else None,
            la_over_k=len(verdict.accepted) / round.k if round.k else None,
        ),
    )


def refuse_nonsense(answer: VerifyResponse, draft: Draft) -> None:
    """An answer must be about the draft that was sent; `UserError` if it is not."""
    nodes = range(answer.accepted_len) if answer.accepted is None else answer.accepted
    parents = [-1, *nodes]
    own = answer.bonus if answer.correction is None else answer.correction
    if (
        len(answer.p) != len(draft)
        or len(answer.choices) != len(draft) + 1
        or any(
            node >= len(draft) or draft.parents[node] != parent for parent, node in zip(parents, nodes, strict=False)
        )
        or any(node >= len(draft) for node in answer.tested or ())
        or (answer.draws is not None and answer.tested is not None and len(answer.draws) != len(answer.tested))
        or own is None
    ):
        raise UserError("the cloud's answer does not fit the draft that was sent: is it a service of this version?")


def verdict_of(answer: VerifyResponse, draft: Draft, draft_top: tuple = ()) -> Verdict:
    """The verdict that an answer tells of, at the edge that made the draft.

    A tested node's beta is min(1, p / q) of its token, whose mean over what q draws is sum min(p, q).
    """
    chain = answer.accepted is None
    accepted = tuple(range(answer.accepted_len) if chain else answer.accepted)
    tested = list(range(min(answer.accepted_len + 1, len(draft))) if chain else answer.tested or ())
    draws: list[float | None] = [None] * len(draft)
    betas: list[float | None] = [None] * len(draft)
    for i, node in enumerate(tested):
        q = 1.0 if draft.token_probs is None else draft.token_probs[node]
        betas[node] = min(1.0, answer.p[node] / q) if q else 0.0
        draws[node] = answer.draws[i] if answer.draws else None
    return Verdict(
        accepted,
        answer.bonus if answer.correction is None else answer.correction,
        tuple(answer.p),
        tuple(draws),
        tuple(betas),
        tuple(map(tuple, answer.choices)),
        target_top=tuple(
            TopTokens(probs.entropy, tuple(zip(probs.ids, probs.p, strict=True))) for probs in answer.laws or ()
        ),
        draft_top=draft_top,
    )
