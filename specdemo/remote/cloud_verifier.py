"""Verification of requests, and conversion between verdicts and messages.

Noise is keyed by token position, so repeated requests get the same response, even after a restart.
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
from specdemo.core.step import Draft, RowNeeded, Verdict
from specdemo.core.verifier import ModelVerifier
from specdemo.remote.protocol import TopTokensMessage, VerifyConfig, VerifyMetrics, VerifyRequest, VerifyResponse

Score = Callable[[Sequence[int], Draft], Tensor]
NoiseSources = Callable[[VerifyConfig, int], tuple[Any, Any]]  # config, position -> acceptance noise, token noise


def position_noise(config: VerifyConfig, position: int) -> tuple[Any, Any]:
    """Return acceptance and token noise of the step at `position`."""
    accept = Noise(config.seed, f"accept/{position}")
    if RULES[config.rule].shares_noise:
        return accept, SharedNoise(config.seed)
    return accept, Noise(config.seed, f"correct/{position}")


class SentRows:
    """Received draft distributions; missing rows raise `RowNeeded`."""

    def __init__(self, rows: Mapping[int, Tensor]) -> None:
        self._rows = rows

    def __getitem__(self, node: int) -> Tensor:
        if node not in self._rows:
            raise RowNeeded(node)
        return self._rows[node]


class ScalarRows:
    """Rows with only the drafted token's probability (practice guide, 3.1); exact for point masses."""

    def __init__(self, draft: Draft, vocab_size: int, device: torch.device) -> None:
        self._draft, self._vocab_size, self._device = draft, vocab_size, device

    def __getitem__(self, node: int) -> Tensor:
        row = torch.zeros(self._vocab_size, device=self._device)
        row[self._draft.tokens[node]] = (self._draft.token_probs or ())[node]
        return row


def check_token_ids(tokens: Sequence[int], vocab_size: int) -> None:
    if max(tokens, default=0) >= vocab_size:
        raise UserError(f"a token is not among the model's {vocab_size:,} ids: use the tokenizer of the target")


def draft_from_request(request: VerifyRequest, vocab_size: int, device: torch.device) -> Draft:
    n = len(request.draft_tokens)
    if request.k != n:
        raise UserError(f"k is {request.k} and {n} tokens were drafted: send k tokens")
    lists = {"parents": request.parents, "q_token_probs": request.token_probs, "hard_mask": request.hard_mask}
    for name, values in lists.items():
        if values is not None and len(values) != n:
            raise UserError(f"{name} has {len(values)} entries for {n} draft tokens: send {n} entries")
    check_token_ids([*request.draft_tokens, *request.tokens], vocab_size)
    parents = request.parents if request.parents is not None else list(range(-1, n - 1))
    if any(parent >= node for node, parent in enumerate(parents)):
        raise UserError("a node's parent must precede it: order the draft from the root")
    q = None if request.token_probs is None else tuple(request.token_probs)
    draft = Draft(tuple(request.draft_tokens), tuple(parents), q)
    if q is None:
        return draft
    if request.rows is None:
        return Draft(draft.tokens, draft.parents, q, ScalarRows(draft, vocab_size, device))
    if any(row.node >= n for row in request.rows):
        raise UserError(f"a row belongs to no node of the {n} draft tokens: send rows of the draft")
    rows = {row.node: row.probs(vocab_size).to(device) for row in request.rows}
    return Draft(draft.tokens, draft.parents, q, SentRows(rows))


def build_verifier(
    config: VerifyConfig, score: Score, position: int, sources: NoiseSources = position_noise, **display: int
) -> ModelVerifier:
    if config.rule not in RULES:
        raise UserError(f"unknown rule {config.rule!r}: known are {', '.join(RULES)}")
    rule = RULES[config.rule]
    apply: Any = rule.apply
    if not config.adjust:
        if not rule.adjusts:
            raise UserError(f"rule {config.rule} has no sample adjustment to skip: choose rule rejection")
        apply = partial(apply, adjust=False)
    if rule.threshold is not None:
        apply = partial(apply, threshold=rule.threshold if config.threshold is None else config.threshold)
    accept, correct = sources(config, position)
    return ModelVerifier(score, config.sampling, apply, accept, correct, **display)


def verify_request(
    request: VerifyRequest,
    tokens: Sequence[int],
    draft: Draft,
    config: VerifyConfig,
    score: Score,
    sources: NoiseSources = position_noise,
) -> VerifyResponse:
    verifier = build_verifier(config, score, len(tokens), sources, candidates=request.candidates, top=request.top)
    try:
        verdict = verifier.verify(tokens, draft)
    except RowNeeded as missing:
        return VerifyResponse(epoch=request.epoch, step=request.step, accepted_len=0, wanted_row=missing.node)
    return _response(request, draft, verdict)


def _response(request: VerifyRequest, draft: Draft, verdict: Verdict) -> VerifyResponse:
    tested = [node for node, beta in enumerate(verdict.beta) if beta is not None]
    draws = [draw for node in tested if (draw := verdict.draw[node]) is not None]
    alphas = [_acceptance(verdict.p[node], draft, node) for node in tested]
    last = verdict.accepted[-1] if verdict.accepted else -1
    rejected = last in draft.parents
    return VerifyResponse(
        epoch=request.epoch,
        step=request.step,
        accepted_len=len(verdict.accepted),
        correction=verdict.token if rejected else None,
        bonus=None if rejected else verdict.token,
        accepted=None if request.parents is None else list(verdict.accepted),
        tested=None if request.parents is None else tested,
        p=list(verdict.p),
        draws=draws if draws and len(draws) == len(tested) else None,
        choices=[list(row) for row in verdict.choices],
        target_top=[TopTokensMessage.of(top) for top in verdict.target_top] or None,
        bounds=list(verdict.bound) or None if request.top else None,
        ranks=list(verdict.rank) or None,
        token_top=None if verdict.token_top is None else TopTokensMessage.of(verdict.token_top),
        metrics=VerifyMetrics(
            alpha_mean=sum(alphas) / len(alphas) if alphas else None,
            la_over_k=len(verdict.accepted) / request.k if request.k else None,
        ),
    )


def check_response(response: VerifyResponse, draft: Draft) -> None:
    """Raise `UserError` if the response does not belong to `draft`."""
    nodes = response.accepted_nodes
    if (
        len(response.p) != len(draft)
        or len(response.choices) != len(draft) + 1
        or any(
            node >= len(draft) or draft.parents[node] != parent
            for parent, node in zip([-1, *nodes], nodes, strict=False)
        )
        or any(node >= len(draft) for node in response.tested or ())
        or (response.tested is not None and len(response.draws or response.tested) != len(response.tested))
        or any(values and len(values) != len(draft) for values in (response.bounds, response.ranks))
        or len(response.target_top or response.choices) != len(response.choices)
        or response.token is None
    ):
        raise UserError("the cloud's response does not fit the draft: use the same version at both ends")


def verdict_from_response(response: VerifyResponse, draft: Draft) -> Verdict:
    """Convert a response to a verdict; beta is min(1, p / q), with mean sum min(p, q) over q."""
    accepted = tuple(response.accepted_nodes)
    tested = response.tested
    if tested is None:
        tested = list(range(min(response.accepted_len + 1, len(draft)))) if response.accepted is None else []
    draws: list[float | None] = [None] * len(draft)
    betas: list[float | None] = [None] * len(draft)
    for i, node in enumerate(tested):
        betas[node] = _acceptance(response.p[node], draft, node)
        draws[node] = response.draws[i] if response.draws else None
    return Verdict(
        accepted,
        response.token,
        tuple(response.p),
        tuple(draws),
        tuple(betas),
        tuple(map(tuple, response.choices)),
        bound=tuple(response.bounds or _bounds(draws, betas)),
        rank=tuple(response.ranks or ()),
        target_top=tuple(top.decoded() for top in response.target_top or ()),
        token_top=None if response.token_top is None else response.token_top.decoded(),
    )


def _bounds(draws: Sequence[float | None], betas: Sequence[float | None]) -> list[float | None]:
    """Return the bounds of random acceptance tests without siblings, which are min(1, p / q)."""
    return [None if draw is None else beta for draw, beta in zip(draws, betas, strict=True)]


def _acceptance(p: float, draft: Draft, node: int) -> float:
    q = 1.0 if draft.token_probs is None else draft.token_probs[node]
    return min(1.0, p / q) if q else 0.0
