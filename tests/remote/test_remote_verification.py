"""Edge and cloud in one process, through the real encoding: the laws, the faults, the contexts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fakes.enumeration import (
    DRAFTERS,
    PROMPT,
    ROUNDING,
    SAMPLING,
    SMALL,
    STOP,
    TARGET,
    VOCAB,
    distance,
    true_distribution,
)
from fakes.remote import COUPLED, LONG, Direct, Once, Table, contexts, plain, settings, texts
from fakes.tiny_models import Explorer, committed, run, up_to

from specdemo.core.policies import Fixed
from specdemo.core.rules import RULES, rejection
from specdemo.core.sampling import Noise, SamplingParams, SharedNoise
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.model import ModelDrafter
from specdemo.remote.client import RemoteVerifier
from specdemo.remote.cloud_verifier import keyed
from specdemo.remote.contexts import Contexts, StaleRequest, UnknownContext
from specdemo.remote.protocol import ENCODINGS, DraftRow, VerifyConfig, VerifyRequest, WireMessage, digest
from specdemo.remote.transport import ContextGone, NoResponse, RequestSuperseded


def remote_distribution(
    sampling: SamplingParams,
    drafter: str,
    rule: str = "rejection",
    rows: str = "float32",
    kind: str = "application/msgpack",
    **more: Any,
) -> tuple[dict[tuple[int, ...], float], int, int, set[bool]]:
    """The law of the texts that the loop gives over the wire; tokens drafted and accepted; whether rows were sent."""
    explorer = Explorer()
    drafted = accepted = 0
    with_rows: set[bool] = set()

    def once() -> tuple[int, ...]:
        nonlocal drafted, accepted
        said: dict[Any, Any] = {}

        def sources(settings: VerifyConfig, place: int) -> tuple[Any, Any]:
            both = Once(explorer, place, said)
            return both, both

        http = Direct(contexts(sources=sources), kind)
        verifier = RemoteVerifier(http, settings(sampling, rule, **more), rows=rows, candidates=2)
        steps = run(PROMPT, verifier, DRAFTERS[drafter](sampling, explorer), Fixed(2), 3, STOP)
        drafted += sum(len(step.draft) for step in steps)
        accepted += sum(len(step.verdict.accepted) for step in steps)
        with_rows.update(bool(message.rows) for message in http.sent)
        return tuple(committed(steps))

    return explorer.distribution(once), drafted, accepted, with_rows


@pytest.mark.parametrize("drafter", ["model", "siblings", "tree", "n-grams", "lookahead", "guessed forest", "hybrid"])
@pytest.mark.parametrize("sampling", ["plain", "top-p", "penalty", "greedy"])
def test_rejection_over_the_wire_keeps_the_law(sampling: str, drafter: str) -> None:
    """Point masses, sampled chains and sampled forests, whose corrections need the drafter's row."""
    probs, drafted, accepted, with_rows = remote_distribution(SAMPLING[sampling], drafter)
    assert distance(probs, true_distribution(SAMPLING[sampling], 3, STOP)) < ROUNDING
    assert drafted > 0 and (accepted > 0 or drafter in ("n-grams", "lookahead") or sampling == "greedy")
    if drafter in ("model", "siblings") and sampling != "greedy":
        assert with_rows == {True, False}  # fetched where something was rejected, and nowhere else
    if drafter in ("n-grams", "lookahead", "guessed forest") or sampling == "greedy" and drafter != "siblings":
        assert with_rows == {False}


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("drafter", ["model", "siblings", "guesses"])
def test_rules_that_draw_from_p_need_ids_only(rule: str, drafter: str) -> None:
    probs, drafted, accepted, with_rows = remote_distribution(SamplingParams(), drafter, rule)
    assert distance(probs, true_distribution(SamplingParams(), 3, STOP)) < ROUNDING
    assert drafted > accepted > 0 and with_rows == {False}


def test_json_keeps_the_law_too() -> None:
    probs, _, _, with_rows = remote_distribution(SamplingParams(), "model", kind="application/json")
    assert distance(probs, true_distribution(SamplingParams(), 3, STOP)) < ROUNDING and with_rows == {True, False}


def test_the_scalar_residual_is_exact_for_point_masses_and_seen_for_sampled_drafts() -> None:
    """The guide's r(v) ~ p(v) - [v = y] q(y) (its section 3.1): the rest of q's mass is never taken off."""
    probs, _, _, with_rows = remote_distribution(SamplingParams(), "guesses", rows="scalar")
    assert distance(probs, true_distribution(SamplingParams(), 3, STOP)) < ROUNDING and with_rows == {False}
    probs, drafted, accepted, with_rows = remote_distribution(SamplingParams(), "model", rows="scalar")
    assert distance(probs, true_distribution(SamplingParams(), 3, STOP)) > 0.02
    assert drafted > accepted > 0 and with_rows == {False}


def test_the_scalar_residual_is_off_by_what_theory_says() -> None:
    """One drafted token y ~ q: accepted min(p, q); else drawn from (p - [y] q(y))+ normalised."""
    p, q = torch.tensor([0.6, 0.3, 0.1, 0.0]), torch.tensor([0.2, 0.3, 0.5, 0.0])
    rejected = (q - p).clamp(min=0)
    expected = torch.minimum(p, q)
    for y in range(4):
        left = p.clone()
        left[y] = max(0.0, float(p[y] - q[y]))
        expected = expected + rejected[y] * left / left.sum()
    explorer = Explorer()

    class Fixed4(Table):
        def __init__(self) -> None:
            self.score = lambda tokens, draft: p.log().expand(len(draft) + 1, 4)

    def once() -> int:
        said: dict[Any, Any] = {}
        cloud = Contexts(Fixed4, vocab_size=4, context=8, sources=lambda s, place: (Once(explorer, place, said),) * 2)
        token = explorer.sample(q)
        verifier = RemoteVerifier(Direct(cloud), VerifyConfig(), rows="scalar")
        verdict = verifier.verify([1], Draft.chain((token,), (float(q[token]),), q[None]))
        return token if verdict.accepted else verdict.token

    probs = explorer.distribution(once)
    assert [probs.get(i, 0.0) for i in range(4)] == pytest.approx(expected.tolist(), abs=1e-6)
    assert distance(probs, dict(enumerate(p.tolist()))) > 0.05


def test_half_precision_rows_are_off_by_no_more_than_rounding() -> None:
    probs, _, _, with_rows = remote_distribution(SamplingParams(), "model", rows="float16")
    assert 1e-7 < distance(probs, true_distribution(SamplingParams(), 3, STOP)) < 2e-3 and with_rows == {True, False}


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.exact(SamplingParams())])
def test_the_guides_short_cuts_are_seen(rule: str) -> None:
    probs, drafted, accepted, _ = remote_distribution(SamplingParams(), "model", rule)
    assert drafted > accepted > 0 and distance(probs, true_distribution(SamplingParams(), 3, STOP)) > 0.02
    probs, *_ = remote_distribution(SAMPLING["greedy"], "model", rule)
    assert distance(probs, true_distribution(SAMPLING["greedy"], 3, STOP)) < ROUNDING


def test_corrections_from_p_over_the_wire_are_lossy() -> None:
    probs, _, _, with_rows = remote_distribution(SamplingParams(), "model", adjust=False)
    assert distance(probs, true_distribution(SamplingParams(), 3, STOP)) > 0.02 and with_rows == {False}


# --- token by token ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENCODINGS)
def test_coupled_text_over_the_wire_is_plain_text_and_only_news_travel(kind: str) -> None:
    for seed in range(5):
        http = Direct(contexts(), kind)
        steps = texts(http, seed=seed)
        assert committed(steps) == plain(seed)
        assert sum(len(step.verdict.accepted) for step in steps) > 0
        first, *later = http.sent
        assert first.base == 0 and first.tokens == list(PROMPT) and first.sampling_cfg is not None
        assert all(round.tokens == [] and round.sampling_cfg is None and round.q_token_probs is None for round in later)


def test_what_the_edge_tells_of_a_verdict_is_what_the_cloud_found() -> None:
    """The same verdicts as a local target's with the same noise, but for betas of sampled drafts."""

    class Local:
        def verify(self, tokens: Sequence[int], draft: Draft) -> Any:
            accept, correct = keyed(settings(SamplingParams(), seed=3), len(tokens))
            return ModelVerifier(TARGET.score, SamplingParams(), rejection, accept, correct, 2, top=2).verify(
                tokens, draft
            )

    def steps(verifier: Any) -> list[Any]:
        return run(
            PROMPT, verifier, ModelDrafter(SMALL.score, SamplingParams(), Noise(3, "draft"), VOCAB), Fixed(3), 40
        )

    ours = steps(RemoteVerifier(Direct(contexts()), settings(SamplingParams(), seed=3), candidates=2, top=2))
    theirs = steps(Local())
    for a, b in zip(ours, theirs, strict=True):
        assert (a.tokens, a.draft) == (b.tokens, b.draft)
        assert (a.verdict.accepted, a.verdict.token) == (b.verdict.accepted, b.verdict.token)
        assert (a.verdict.p, a.verdict.draw, a.verdict.choices) == (b.verdict.p, b.verdict.draw, b.verdict.choices)
        assert a.verdict.target_top == b.verdict.target_top and a.verdict.draft_top == b.verdict.draft_top
        assert [x is None for x in a.verdict.beta] == [x is None for x in b.verdict.beta]
        assert a.verdict.notes["escalated"] == 1 and a.verdict.notes["bytes_up"] > 0


# --- faults ------------------------------------------------------------------------------------------------------


class Faulty(Direct):
    """Loses, delays, doubles and reorders what goes each way, and now and then the cloud loses its memory."""

    def __init__(self, make: Callable[[], Contexts], seed: int, loss: float = 0.2, amnesia: float = 0.25) -> None:
        super().__init__(make())
        self.make, self.rng, self.loss, self.amnesia = make, random.Random(seed), loss, amnesia
        self.old: list[WireMessage] = []  # requests that are still on their way
        self.faults = dict.fromkeys(("request lost", "answer lost", "restarted", "duplicate", "late duplicate"), 0)

    def call(
        self, method: str, path: str, message: WireMessage | None, answer: type[WireMessage], timeout: float
    ) -> Any:
        def happens(fault: str, chance: float) -> bool:
            hit = self.rng.random() < chance
            self.faults[fault] += hit
            return hit

        assert message is not None
        if happens("restarted", self.amnesia):
            self.cloud = self.make()
        if self.old and happens("late duplicate", 0.3):
            try:
                super().call(method, path, self.rng.choice(self.old), answer, timeout)
            except (ContextGone, RequestSuperseded):
                pass  # nobody is there to hear it
        if happens("request lost", self.loss):
            self.old.append(message)
            raise NoResponse("lost")
        found = super().call(method, path, message, answer, timeout)
        self.old.append(message)
        if happens("duplicate", 0.2):
            assert super().call(method, path, message, answer, timeout) == found
        if happens("answer lost", self.loss):
            raise NoResponse("lost")
        return found


@pytest.mark.parametrize("seed", range(8))
def test_with_every_fault_the_strict_text_is_the_faultless_one(seed: int) -> None:
    http = Faulty(contexts, seed)
    assert committed(texts(http, seed=seed)) == plain(seed)
    assert min(http.faults.values()) > 0, http.faults


def test_sampled_rounds_too_have_one_answer_however_often_they_are_asked() -> None:
    """Rejection at temperature 1: chance is keyed by place, so faults change nothing of the text."""

    def text(http: Direct) -> list[int]:
        verifier = RemoteVerifier(http, settings(SamplingParams(), seed=1), pause=lambda seconds: None)
        drafter = ModelDrafter(SMALL.score, SamplingParams(), Noise(1, "draft"), VOCAB)
        return committed(run(PROMPT, verifier, drafter, Fixed(3), LONG))

    faultless = text(Direct(contexts()))
    for seed in range(4):
        http = Faulty(contexts, seed)
        assert text(http) == faultless
        assert any(round.rows for round in http.sent) and http.faults["restarted"]


def test_mutant_chance_that_is_not_keyed_by_place_shows() -> None:
    """One stream for all rounds: a cloud that restarts, or answers twice, goes on with other numbers."""

    def forgetful() -> Contexts:
        streams: dict[int, Any] = {}

        def sources(chosen: VerifyConfig, place: int) -> Any:
            return streams.setdefault(chosen.seed, (Noise(chosen.seed, "accept"), Noise(chosen.seed, "correct")))

        return contexts(sources=sources)

    def text(http: Direct) -> list[int]:
        verifier = RemoteVerifier(http, settings(SamplingParams(), seed=1), pause=lambda seconds: None)
        return committed(
            run(PROMPT, verifier, ModelDrafter(SMALL.score, SamplingParams(), Noise(1, "draft"), VOCAB), Fixed(3), LONG)
        )

    assert any(text(Faulty(forgetful, seed)) != text(Direct(forgetful())) for seed in range(4))


def test_two_edges_with_one_context_each_write_their_own_text() -> None:
    cloud = contexts()
    judges = [
        RemoteVerifier(
            Direct(cloud), settings(SamplingParams(), "coupled", seed), ctx_id="same", pause=lambda seconds: None
        )
        for seed in (1, 2)
    ]
    written: list[list[int]] = [list(PROMPT), list(PROMPT)]
    for _ in range(12):  # in turn, so that each always finds the other's text
        for seed, (verifier, text) in enumerate(zip(judges, written, strict=True), 1):
            drafter = ModelDrafter(SMALL.score, SamplingParams(), SharedNoise(seed), VOCAB)
            draft = drafter.propose(text, up_to(2)) if len(text) > len(PROMPT) else Draft()
            verdict = verifier.verify(text, draft)
            text += [*(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens]
    for seed, text in enumerate(written, 1):
        assert text[len(PROMPT) :] == plain(seed)[: len(text) - len(PROMPT)]
    assert written[0] != written[1] and len(cloud) == 2


# --- contexts ----------------------------------------------------------------------------------------------------


def a_round(**changes: Any) -> VerifyRequest:
    return VerifyRequest(
        **{"ctx_id": "a", "round": 0, "base": 0, "k": 0, "tokens": [2, 0], "sampling_cfg": COUPLED, **changes}
    )


def test_a_repeated_round_has_the_same_answer_and_costs_no_pass() -> None:
    passes = []

    class Counting(Table):
        def __init__(self) -> None:
            self.score = lambda tokens, draft: passes.append(len(tokens)) or TARGET.score(tokens, draft)

    cloud = Contexts(Counting, vocab_size=VOCAB, context=64)
    first = cloud.answer(a_round())
    assert cloud.answer(a_round()) is first and passes == [2]


def test_old_epochs_and_overtaken_rounds_are_fenced_off() -> None:
    cloud = contexts()
    first = cloud.answer(a_round(epoch=1))
    text = [2, 0, first.bonus]
    second = cloud.answer(a_round(epoch=1, round=1, base=3, digest=digest(text), tokens=[], sampling_cfg=None))
    for late in (
        a_round(epoch=0, round=9),
        a_round(epoch=1, round=0),
        a_round(epoch=1, round=1, base=3, digest=digest(text), tokens=[1], sampling_cfg=None),
    ):
        with pytest.raises(StaleRequest):
            cloud.answer(late)
    text.append(second.bonus)
    assert cloud.answer(a_round(epoch=1, round=2, base=4, digest=digest(text), tokens=[], sampling_cfg=None)).round == 2


def test_a_text_that_came_apart_is_asked_for_whole() -> None:
    cloud = contexts()
    cloud.answer(a_round())
    for changes in ({"ctx_id": "b"}, {"base": 2, "digest": digest([2, 1])}, {"base": 9}, {"epoch": 2}):
        with pytest.raises(UnknownContext):
            cloud.answer(a_round(**{"round": 1, "base": 2, "digest": digest([2, 0]), "tokens": [], **changes}))


@pytest.mark.parametrize(("limit", "kept"), [({"most": 2}, 2), ({"budget_bytes": 250}, 2), ({"budget_bytes": 0}, 0)])
def test_memory_is_bounded_and_the_longest_unused_go_first(limit: dict[str, int], kept: int) -> None:
    cloud = contexts(**limit)
    for name in "abcd":
        cloud.answer(a_round(ctx_id=name))
    assert len(cloud) == kept and cloud.reserved_bytes <= limit.get("budget_bytes", math.inf)
    assert [name for name in "abcd" if cloud.forget(name)] == list("abcd")[4 - kept :]
    assert committed(texts(Direct(contexts(**limit)))) == plain()


def test_rows_that_came_along_count_as_memory() -> None:
    """A cache of 100 bytes, and four probabilities of four bytes."""
    probs = torch.full((VOCAB,), 1 / VOCAB)
    drafted = {"draft_tokens": [1], "k": 1, "q_token_probs": [0.25], "rows": [DraftRow.of(0, probs)]}
    chosen = settings(SamplingParams())
    held = []
    for budget_bytes in (100 + 4 * VOCAB, 99 + 4 * VOCAB):
        cloud = contexts(budget_bytes=budget_bytes)
        cloud.answer(a_round(sampling_cfg=chosen, **drafted))
        held.append(len(cloud))
    assert held == [1, 0]


def test_contexts_expire() -> None:
    now = [0.0]
    cloud = contexts(expiry_s=10, clock=lambda: now[0])
    cloud.answer(a_round())
    now[0] = 8
    cloud.answer(a_round(ctx_id="b"))
    now[0] = 12
    cloud.answer(a_round(ctx_id="c"))
    assert not cloud.forget("a") and cloud.forget("b") and cloud.forget("c")


@pytest.mark.parametrize("type", ["f4", "f2"])
def test_a_row_travels_the_shorter_way_and_arrives_as_it_was(type: Any) -> None:
    flat, peaked = torch.full((64,), 1 / 64), torch.zeros(64)
    peaked[5], peaked[40] = 0.75, 0.25
    for probs, dense in ((flat, True), (peaked, False)):
        row = DraftRow.of(3, probs, type)
        assert (row.ids is None) == dense and row.probs(64).tolist() == probs.tolist()
