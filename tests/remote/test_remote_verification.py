"""Edge and cloud in one process with the real codecs: distributions, faults, contexts."""

import math
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from fakes.remote import (
    COUPLED,
    LONG,
    DirectClient,
    RepeatableNoise,
    context_request,
    contexts,
    decode_coupled,
    decode_locally,
    later_request,
    remote_verifier,
    response_of,
    verify_config,
)
from fakes.tiny_models import Explorer, committed, run, up_to

from specdemo.core.errors import UserError
from specdemo.core.policies import Fixed
from specdemo.core.rules import RULES, rejection
from specdemo.core.sampling import Noise, SamplingParams, SharedNoise
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ModelDrafter
from specdemo.remote.contexts import Contexts, StaleRequest, UnknownContext, position_noise
from specdemo.remote.link import NewContext, ResendText, Retry
from specdemo.remote.protocol import CODECS, NetworkMessage, VerifyConfig, digest
from specdemo.remote.target import ContextState, RemoteSession
from specdemo.worker import Worker, device_released

pytestmark = pytest.mark.slow


def remote_distribution(
    sampling: SamplingParams,
    drafter: str,
    rule: str = "rejection",
    rows: str = "float32",
    kind: str = "application/msgpack",
    **more: Any,
) -> tuple[dict[tuple[int, ...], float], int, int, set[bool]]:
    """Return the output distribution, the counts of drafted and accepted tokens, and a flag for sent rows."""
    explorer = Explorer()
    drafted = accepted = 0
    with_rows: set[bool] = set()

    def decode_once() -> tuple[int, ...]:
        nonlocal drafted, accepted
        values: dict[Any, Any] = {}

        def sources(config: VerifyConfig, position: int) -> tuple[Any, Any]:
            noise = RepeatableNoise(explorer, position, values)
            return noise, noise

        http = DirectClient(contexts(noise_sources=sources), kind)
        verifier = remote_verifier(http, verify_config(sampling, rule, **more), rows=rows, candidates=2)
        steps = run(PROMPT, verifier, DRAFTERS[drafter](sampling, explorer), Fixed(2), 3, STOP)
        drafted += sum(len(step.draft) for step in steps)
        accepted += sum(len(step.verdict.accepted) for step in steps)
        with_rows.update(bool(message.rows) for message in http.sent)
        return tuple(committed(steps))

    return explorer.distribution(decode_once), drafted, accepted, with_rows


DRAFTED_BY = ("model", "siblings", "sparse siblings", "tree", "n-grams", "lookahead", "guessed forest", "hybrid")
CASES = [("plain", drafter) for drafter in DRAFTED_BY]
CASES += [
    (sampling, drafter) for sampling in ("top-p", "min-p", "penalty", "greedy") for drafter in ("model", "siblings")
]


@pytest.mark.parametrize(("sampling", "drafter"), CASES)
def test_remote_rejection_keeps_the_distribution(sampling: str, drafter: str) -> None:
    """Point masses, sampled chains and sampled forests; corrections of sampled drafts need the draft row."""
    probs, drafted, accepted, with_rows = remote_distribution(SAMPLING[sampling], drafter)
    assert distance(probs, true_distribution(SAMPLING[sampling], 3, STOP)) < ROUNDING
    assert drafted > 0 and (accepted > 0 or drafter in ("n-grams", "lookahead") or sampling == "greedy")
    if drafter in ("model", "siblings", "sparse siblings") and sampling != "greedy":
        assert with_rows == {True, False}  # requested after rejections only
    if drafter in ("n-grams", "lookahead", "guessed forest") or (sampling, drafter) == ("greedy", "model"):
        assert with_rows == {False}


@pytest.mark.parametrize(
    ("sampling", "drafter"),
    [("plain", "model"), ("plain", "mixed"), ("plain", "guesses"), ("top-p", "mixed"), ("greedy", "model")],
)
def test_remote_block_verification_keeps_the_distribution(sampling: str, drafter: str) -> None:
    probs, drafted, accepted, with_rows = remote_distribution(SAMPLING[sampling], drafter, "block")
    assert distance(probs, true_distribution(SAMPLING[sampling], 3, STOP)) < ROUNDING
    assert drafted > 0 and (accepted > 0 or drafter == "guesses" or sampling == "greedy")
    assert (True in with_rows) == (sampling != "greedy" and drafter in ("model", "mixed"))


def test_all_rows_of_a_block_are_requested_at_once() -> None:
    """At most a second request per step, with the row of every node; the verdict equals the local one."""
    http = DirectClient(contexts())
    verifier = remote_verifier(http, verify_config(SamplingParams(), "block", seed=3), candidates=2)
    drafter = ModelDrafter(SMALL.score, SamplingParams(), Noise(3, "draft"), VOCAB)
    tokens, trips = list(PROMPT), []
    for _ in range(20):
        http.sent.clear()
        http.responses.clear()
        draft = drafter.propose(tokens, up_to(3))
        verdict = verifier.verify(tokens, draft)
        local = ModelVerifier(
            TARGET.score,
            SamplingParams(),
            RULES["block"].apply,
            *position_noise(verify_config(SamplingParams(), seed=3), len(tokens)),
        ).verify(tokens, draft)
        for name in ("accepted", "token", "p", "draw", "bound"):
            assert getattr(verdict, name) == getattr(local, name), name
        assert None not in verdict.beta
        assert all(response.wanted_row is None for response in http.responses)
        trips.append(len(http.sent))
        if len(http.sent) > 1:
            assert http.responses[0].wanted_rows == [0, 1, 2] and not http.sent[0].rows
            assert [row.node for row in http.sent[1].rows] == [0, 1, 2]
        tokens += [*(draft.tokens[node] for node in verdict.accepted), verdict.token]
    assert set(trips) <= {1, 2} and 2 in trips


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("drafter", ["siblings", "guesses"])
def test_rules_that_sample_from_p_send_ids_only(rule: str, drafter: str) -> None:
    probs, drafted, accepted, with_rows = remote_distribution(SamplingParams(), drafter, rule)
    assert distance(probs, true_distribution(SamplingParams(), 3, STOP)) < ROUNDING
    assert drafted > accepted > 0 and with_rows == {False}


def test_encodings_of_messages_and_rows() -> None:
    """Half precision differs by rounding. Without the remaining mass of q (practice guide, section 3.1) it is lossy."""
    true = true_distribution(SamplingParams(), 3, STOP)
    for options, (least, most), rows in (
        ({"kind": "application/json"}, (-1.0, ROUNDING), {True, False}),
        ({"rows": "float16"}, (1e-7, 2e-3), {True, False}),
        ({"rows": "scalar"}, (0.02, 1.0), {False}),
        ({"rows": "scalar", "rule": "block"}, (0.01, 1.0), {False}),
        ({"adjust": False}, (0.02, 1.0), {False}),  # corrections from p
    ):
        probs, drafted, accepted, with_rows = remote_distribution(SamplingParams(), "model", **options)
        assert least < distance(probs, true) < most and drafted > accepted > 0 and with_rows == rows, options
    probs, _, _, with_rows = remote_distribution(SamplingParams(), "guesses", rows="scalar")
    assert distance(probs, true) < ROUNDING and with_rows == {False}  # point masses


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.exact(SamplingParams())])
def test_lossy_rules_change_the_distribution(rule: str) -> None:
    probs, drafted, accepted, _ = remote_distribution(SamplingParams(), "model", rule)
    assert drafted > accepted > 0 and distance(probs, true_distribution(SamplingParams(), 3, STOP)) > 0.02
    probs, *_ = remote_distribution(SAMPLING["greedy"], "model", rule)
    if RULES[rule].exact(SAMPLING["greedy"]):
        assert distance(probs, true_distribution(SAMPLING["greedy"], 3, STOP)) < ROUNDING


# --- token by token ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CODECS)
def test_coupled_text_equals_the_local_text_and_only_new_tokens_are_sent(kind: str) -> None:
    for seed in range(5):
        http = DirectClient(contexts(), kind)
        steps = decode_coupled(http, seed=seed)
        assert committed(steps) == decode_locally(seed)
        assert sum(len(step.verdict.accepted) for step in steps) > 0
        first, *later = http.sent
        assert first.base == 0 and first.tokens == list(PROMPT) and first.config is not None
        assert all(request.tokens == [] and request.config is None and request.token_probs is None for request in later)


def test_remote_verdicts_equal_local_verdicts() -> None:
    """With the same noise; betas of sampled drafts differ by definition.

    The cloud lacks q, so fewer tokens of each distribution are recorded.
    """

    class Local:
        def verify(self, tokens: Sequence[int], draft: Draft) -> Any:
            accept, correct = position_noise(verify_config(SamplingParams(), seed=3), len(tokens))
            return ModelVerifier(TARGET.score, SamplingParams(), rejection, accept, correct, 2, top=2).verify(
                tokens, draft
            )

    def steps(verifier: Any) -> list[Any]:
        return run(
            PROMPT, verifier, ModelDrafter(SMALL.score, SamplingParams(), Noise(3, "draft"), VOCAB), Fixed(3), 40
        )

    config = verify_config(SamplingParams(), seed=3)
    remote = steps(remote_verifier(DirectClient(contexts()), config, candidates=2, top=2))
    for a, b in zip(remote, steps(Local()), strict=True):
        assert (a.tokens, a.draft) == (b.tokens, b.draft)
        assert (a.verdict.accepted, a.verdict.token) == (b.verdict.accepted, b.verdict.token)
        assert (a.verdict.p, a.verdict.draw, a.verdict.choices) == (b.verdict.p, b.verdict.draw, b.verdict.choices)
        assert (a.verdict.bound, a.verdict.rank) == (b.verdict.bound, b.verdict.rank)
        tops = zip(a.verdict.tops, b.verdict.tops, strict=True)
        assert all(one.entropy == other.entropy and {*one.top} <= {*other.top} for one, other in tops)
        assert [x is None for x in a.verdict.beta] == [x is None for x in b.verdict.beta]
        assert a.verified and a.verdict.link.bytes_up > 0


# --- faults ------------------------------------------------------------------------------------------------------


class Faulty(DirectClient):
    """Lose, delay, duplicate and reorder messages, and restart the cloud."""

    def __init__(self, make: Callable[[], Contexts], seed: int, loss: float = 0.2, amnesia: float = 0.25) -> None:
        super().__init__(make())
        self.make, self.rng, self.loss, self.amnesia = make, random.Random(seed), loss, amnesia
        self.old: list[NetworkMessage] = []  # requests that may arrive late
        self.faults = dict.fromkeys(("request lost", "answer lost", "restarted", "duplicate", "late duplicate"), 0)

    def exchange(self, message: Any, kind: type[NetworkMessage]) -> Any:
        if self._happens("restarted", self.amnesia):
            self.cloud = self.make()
        if self.old and self._happens("late duplicate", 0.3):
            with suppress(ResendText, NewContext):  # the client has left
                super().exchange(self.rng.choice(self.old), kind)
        self.old.append(message)
        if self._happens("request lost", self.loss):
            raise Retry("lost")
        response = super().exchange(message, kind)
        if self._happens("duplicate", 0.2):
            assert super().exchange(message, kind) == response
        if self._happens("answer lost", self.loss):
            raise Retry("lost")
        return response

    def _happens(self, fault: str, chance: float) -> bool:
        hit = self.rng.random() < chance
        self.faults[fault] += hit
        return hit


@pytest.mark.parametrize("seed", range(4))
def test_faults_do_not_change_the_text(seed: int) -> None:
    http = Faulty(contexts, seed)
    assert committed(decode_coupled(http, seed=seed)) == decode_locally(seed)
    assert min(http.faults.values()) > 0, http.faults


def sampled_text(http: DirectClient) -> list[int]:
    """Decode with rejection at temperature 1 and noise keyed by position."""
    verifier = remote_verifier(http, verify_config(SamplingParams(), seed=1), sleep=lambda seconds: None)
    drafter = ModelDrafter(SMALL.score, SamplingParams(), Noise(1, "draft"), VOCAB)
    return committed(run(PROMPT, verifier, drafter, Fixed(3), LONG))


def test_faults_do_not_change_sampled_text() -> None:
    """Mutant: a noise stream without position keys gives other numbers after a restart."""

    def forgetful() -> Contexts:
        streams: dict[int, Any] = {}

        def sources(config: VerifyConfig, position: int) -> Any:
            return streams.setdefault(config.seed, (Noise(config.seed, "accept"), Noise(config.seed, "correct")))

        return contexts(noise_sources=sources)

    faultless = sampled_text(DirectClient(contexts()))
    for seed in range(4):
        http = Faulty(contexts, seed)
        assert sampled_text(http) == faultless
        assert any(request.rows for request in http.sent) and http.faults["restarted"]
    assert any(sampled_text(Faulty(forgetful, seed)) != sampled_text(DirectClient(forgetful())) for seed in range(4))


def test_edges_with_the_same_context_id_do_not_mix() -> None:
    cloud, verifiers = contexts(), []
    for seed in (1, 2):
        config, session = verify_config(SamplingParams(), "coupled", seed), RemoteSession()
        session.contexts[config.model_dump_json()] = ContextState("same")
        verifiers.append(remote_verifier(DirectClient(cloud), config, session=session, sleep=lambda seconds: None))
    written: list[list[int]] = [list(PROMPT), list(PROMPT)]
    for _ in range(12):  # alternating
        for seed, (verifier, text) in enumerate(zip(verifiers, written, strict=True), 1):
            drafter = ModelDrafter(SMALL.score, SamplingParams(), SharedNoise(seed), VOCAB)
            draft = drafter.propose(text, up_to(2)) if len(text) > len(PROMPT) else Draft()
            verdict = verifier.verify(text, draft)
            text += [*(draft.tokens[node] for node in verdict.accepted), *verdict.target_tokens]
    for seed, text in enumerate(written, 1):
        assert text[len(PROMPT) :] == decode_locally(seed)[: len(text) - len(PROMPT)]
    assert written[0] != written[1] and len(cloud) == 2


# --- contexts ----------------------------------------------------------------------------------------------------


def test_the_depth_of_a_forest_must_fit_the_context() -> None:
    cloud, forest = contexts(context=4), {"k": 3, "draft_tokens": [0, 1, 2]}
    assert len(response_of(cloud, context_request(parents=[-1, -1, 0], **forest)).p) == 3
    with pytest.raises(UserError, match="5 tokens do not fit the model's 4"):
        response_of(cloud, context_request(context_id="b", parents=[-1, 0, 1], **forest))


def test_a_draft_of_more_tokens_than_a_service_verifies_is_refused() -> None:
    verifier = remote_verifier(DirectClient(contexts()), COUPLED)
    assert verifier.verify(PROMPT, Draft((1,) * 256, (-1,) * 256)).target_tokens
    with pytest.raises(UserError, match="verifies 256 draft tokens, not 257"):
        verifier.verify(PROMPT, Draft((1,) * 257, (-1,) * 257))


def test_a_context_continues_its_text_only() -> None:
    """Repeated requests have the same response without a pass; stale epochs and steps, other prefixes are refused."""
    passes = []

    def score(tokens: Sequence[int], draft: Draft) -> torch.Tensor:
        passes.append(len(tokens))
        return TARGET.score(tokens, draft)

    cloud = contexts(score)
    first = response_of(cloud, context_request(epoch=1))
    assert response_of(cloud, context_request(epoch=1)) is first and passes == [2]
    text = [2, 0, first.bonus]
    second = response_of(cloud, later_request(text, 1, epoch=1))
    for late in (
        context_request(epoch=0, step=9),
        context_request(epoch=1, step=0),
        later_request(text, 1, epoch=1, tokens=[1]),
    ):
        with pytest.raises(StaleRequest):
            response_of(cloud, late)
    text.append(second.bonus)
    for changes in ({"context_id": "b"}, {"digest": digest([2, 1])}, {"base": 9}, {"epoch": 2}):
        with pytest.raises(UnknownContext):
            response_of(cloud, later_request(text, 2, **{"epoch": 1, **changes}))
    assert response_of(cloud, later_request(text, 2, epoch=1)).step == 2


@pytest.mark.parametrize(
    ("limit", "count"), [({"max_contexts": 2}, 2), ({"budget_bytes": 2.5}, 2), ({"budget_bytes": 0}, 0)]
)
def test_least_recently_used_contexts_are_dropped_first(limit: dict[str, float], count: int) -> None:
    """A budget is given in contexts."""
    if "budget_bytes" in limit:
        cloud = contexts()
        response_of(cloud, context_request())
        limit = {"budget_bytes": round(limit["budget_bytes"] * cloud.reserved_bytes)}
    cloud = contexts(**limit)
    for name in "abcd":
        response_of(cloud, context_request(context_id=name))
    assert len(cloud) == count and cloud.reserved_bytes <= limit.get("budget_bytes", math.inf)
    assert [name for name in "abcd" if cloud.delete(name)] == list("abcd")[4 - count :]
    pauses: list[float] = []  # none before an evicted text is sent again
    assert committed(decode_coupled(DirectClient(contexts(**limit)), sleep=pauses.append)) == decode_locally()
    assert not pauses


def test_contexts_expire() -> None:
    now = [0.0]
    cloud = contexts(expiry_s=10, clock=lambda: now[0])
    for now[0], name in ((0, "a"), (8, "b"), (12, "c")):
        response_of(cloud, context_request(context_id=name))
    assert not cloud.delete("a") and cloud.delete("b") and cloud.delete("c")


class Hooked:
    """Score with the target; call `hook` in the first pass."""

    hook: Callable[[], object] | None = None

    def __call__(self, tokens: Sequence[int], draft: Draft) -> torch.Tensor:
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()
        return TARGET.score(tokens, draft)


@pytest.mark.parametrize("waits", [False, True])
def test_verification_runs_to_completion(waits: bool) -> None:
    """A request that arrives during a pass is verified after it, unless the pass waits without the device."""
    hooked = Hooked()
    cloud, log, later = contexts(hooked), [], []

    def verify(name: str) -> Any:
        log.append(f"{name} begins")
        response = response_of(cloud, context_request(context_id=name))
        log.append(f"{name} ends in {threading.current_thread().name}")
        return response

    def arrive() -> None:
        later.append(worker.submit(lambda: iter((verify("b"),))))
        if waits:
            with device_released():
                assert later[0].wait(60)

    worker, hooked.hook = Worker(), arrive
    first = worker.submit(lambda: iter((verify("a"),)))
    assert first.wait(60) and later[0].wait(60)
    worker.close()
    in_turn = ["a begins", "a ends in device", "b begins", "b ends in device"]
    assert log == ([in_turn[0], *in_turn[2:], in_turn[1]] if waits else in_turn)
    assert first.items[0].bonus == later[0].items[0].bonus and len(cloud) == 2


def test_a_context_in_use_is_neither_evicted_nor_deleted() -> None:
    now, hooked = [0.0], Hooked()
    cloud = contexts(hooked, max_contexts=1, expiry_s=10, clock=lambda: now[0])
    text = [2, 0, response_of(cloud, context_request()).bonus]

    def others_arrive() -> None:
        with pytest.raises(RuntimeError, match="context a is in use"):
            response_of(cloud, context_request(step=2))
        now[0] = 20  # "a" expires
        response_of(cloud, context_request(context_id="b"))
        assert not cloud.delete("a") and not cloud.delete("b")

    hooked.hook = others_arrive
    response = response_of(cloud, later_request(text, 1))
    assert hooked.hook is None and len(cloud) == 1
    text.append(response.bonus)
    assert response_of(cloud, later_request(text, 2)).step == 2
    assert cloud.delete("a")


def test_waiting_is_not_negative_if_a_repeated_request_was_verified_before() -> None:
    """The cloud takes 5 s for the first request, which times out; its stored response arrives 0.25 s later."""
    now = [0.0]

    class Slow(DirectClient):
        def exchange(self, *arguments: Any) -> Any:
            response = super().exchange(*arguments)
            if len(self.sent) > 2:
                return response
            response.metrics.cloud_s = 5.0
            now[0] += 5.0 if len(self.sent) == 1 else 0.25
            if len(self.sent) == 1:
                raise Retry("no response")
            return response

    first, *_ = decode_coupled(Slow(contexts()), max_tokens=2, clock=lambda: now[0])
    assert (first.verdict.link.cloud_s, first.verdict.link.rtt_s) == (5.0, 0.25)
