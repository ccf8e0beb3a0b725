"""Decoding loop: stop tokens, lengths, counts, outcomes, and steps through JSON."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from fakes.tiny_models import GuessDrafter, TableModel, committed, run

from specdemo.core import trace
from specdemo.core.decode import DraftBudget, decode
from specdemo.core.distributions import DenseProbs
from specdemo.core.events import StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, LinkStats, Origin, Outcome, Source, Step, Verdict
from specdemo.core.step_record import step_of
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ModelDrafter

MODEL = TableModel(6, seed=3)
SMALL = TableModel(6, seed=4)
PREFILL = Step(0, (9,), Draft(), Verdict((), 9), 0, 0.0, 0.5, 0.0, t=0.6)


def target(sampling: SamplingParams = SamplingParams(), seed: int = 0) -> ModelVerifier:
    return ModelVerifier(MODEL.score, sampling, rejection, Noise(seed, "accept"), Noise(seed, "correct"), candidates=2)


class Script:
    """Target that accepts every draft token and adds a bonus token, with a drafter that proposes from a list."""

    def __init__(self, text: Sequence[int], prompt: int) -> None:
        self.text, self.prompt = text, prompt

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        rest = self.text[len(tokens) - self.prompt :]
        n = 0
        while n < len(rest) and budget.may_extend(n, None):
            n += 1
        return Draft.chain(tuple(rest[:n]))

    def observe(self, step: Step) -> None: ...

    def verify(self, tokens: Sequence[int], draft: Draft) -> Verdict:
        n = len(draft)
        bonus, ones = self.text[len(tokens) - self.prompt + n], (1.0,) * n
        return Verdict(tuple(range(n)), bonus, p=ones, draw=(0.5,) * n, beta=ones, choices=((0,),) * (n + 1))


TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("gamma", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", range(1, 12))
def test_a_stop_token_ends_the_text_at_any_position(stop: int, gamma: int) -> None:
    """First token, accepted draft or bonus; the earliest of several ids counts; later tokens are not counted."""
    script = Script(TEXT, prompt=1)
    steps = run([0], script, script, Fixed(gamma), 12, stop=(stop, stop + 1, 99))
    assert committed(steps) == TEXT[:stop]
    last = steps[-1]
    accepted = len(last.verdict.accepted)
    assert accepted + (last.verdict.token is not None) == len(last.tokens)
    assert last.verdict.token is not None or accepted in (last.tested, len(last.draft))
    metrics = Metrics.of(steps)
    assert metrics.tokens == stop
    assert metrics.accepted <= metrics.tested <= metrics.drafted


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("length", range(1, 9))
def test_length_is_exact(length: int, gamma: int) -> None:
    for seed in range(8):
        steps = run([1, 2], target(seed=seed), GuessDrafter(6), Fixed(gamma), length)
        assert len(committed(steps)) == length
        assert all(len(step.draft) <= step.gamma <= gamma for step in steps)


def test_the_first_step_may_draft() -> None:
    script = Script(TEXT, prompt=1)
    steps = list(decode([0], script, script, Fixed(3), max_tokens=9, stop=(), clock=lambda: 0.0, first_target=False))
    assert [len(step.draft) for step in steps] == [3, 3, 0] and committed(steps) == TEXT[:9]


def test_times_of_a_step_add_up_to_the_time_since_the_request() -> None:
    """With a clock that counts its readings; policy and drafter see the step before their own time is added."""
    observed: list[Step] = []
    script, policy = Script(TEXT, prompt=1), Fixed(3)
    ticks, elapsed = count(9), count(7)  # the first reading is the beginning
    with pytest.MonkeyPatch.context() as patch:
        for observer in (script, policy):
            patch.setattr(type(observer), "observe", lambda self, step: observed.append(step))
        times: dict[str, Any] = {"clock": lambda: next(ticks), "elapsed": lambda: next(elapsed)}
        steps = list(decode([0], script, script, policy, max_tokens=9, stop=(), **times))
    assert [len(step.draft) for step in steps] == [0, 3, 3]  # the default is a step without a draft
    assert [step.seconds for step in steps] == [(1, 1, 2)] * 3
    assert [step.t for step in steps] == [7, 8, 9]
    assert [step.host_s for step in observed] == [1] * 6
    assert [replace(step, host_s=1) for step in steps] == observed[::2] == observed[1::2]
    assert [(step.gamma, dict(step.policy)) for step in steps] == [(0, {}), (3, {}), (3, {})]


def test_steps_keep_token_probabilities_and_origins_but_no_distributions() -> None:
    script = Script(TEXT, prompt=1)
    chain, origin = Draft.chain((1, 2), (0.5, 0.25)), (Origin(), Origin())
    script.propose = lambda tokens, budget: replace(  # type: ignore[method-assign]
        chain, probs=DenseProbs(torch.zeros(2, 3)), origin=origin
    )
    steps = list(decode([0], script, script, Fixed(2), max_tokens=3, stop=(), clock=float, first_target=False))
    assert [step.draft for step in steps] == [replace(chain, origin=origin)]


def test_without_a_start_the_first_reading_of_the_clock_is_the_request() -> None:
    script, ticks = Script(TEXT, prompt=1), count(10)
    steps = decode([0], script, script, Fixed(3), max_tokens=1, stop=(), clock=lambda: next(ticks))
    assert [step.t for step in steps] == [4]


class NotedPolicy(Fixed):
    """Fixed length with a note."""

    notes = {"threshold": 0.5}


def test_notes_belong_to_steps_that_may_draft_and_unverified_steps_do_not_train_the_policy() -> None:
    script, policy = Script(TEXT, prompt=1), NotedPolicy(2)
    learned: list[int] = []
    policy.observe = lambda step: learned.append(step.i)  # type: ignore[method-assign]
    verify = script.verify
    script.verify = lambda tokens, draft: replace(  # type: ignore[method-assign]
        verify(tokens, draft), source=Source.GATE if len(tokens) == 5 else Source.TARGET
    )
    steps = run([0], script, script, policy, 10)
    assert [dict(step.policy) for step in steps] == [{}, {"threshold": 0.5}, {"threshold": 0.5}, {"threshold": 0.5}]
    assert [step.verified for step in steps] == [True, True, False, True] and learned == [0, 1, 3]


class LogitsPolicy(Fixed):
    """Policy that depends on logits."""

    needs_logits = True
    path_limits: Sequence[float] | None = (0.25, 0.5, 0.75)


@pytest.mark.parametrize(("limits", "paused"), [((0.25, 2.0), False), ((1.0,), False), ((1.5,), True), (None, False)])
def test_drafts_pause_if_no_path_is_probable_enough(limits: Sequence[float] | None, paused: bool) -> None:
    policy = LogitsPolicy(5)
    policy.path_limits = limits
    assert DraftBudget(3, policy).paused == paused and not DraftBudget(3, Fixed(5)).paused


def test_limits_of_a_budget() -> None:
    """The limit of the step, the policy, and the limit of a drafter; without logits the limit alone decides."""
    budget = DraftBudget(3, Fixed(5))
    assert [budget.may_extend(n, None) for n in range(5)] == [True] * 3 + [False] * 2
    assert [DraftBudget(3, Fixed(2)).may_extend(n, None) for n in range(4)] == [True, True, False, False]
    assert budget.chain_limits == [0.0] * 3
    assert budget.at_most(2).limit == 2 and budget.at_most(7).limit == 3
    assert not budget.at_most(1).may_extend(1, None)
    policy = LogitsPolicy(5)
    assert DraftBudget(3, policy).chain_limits == (0.25, 0.5, 0.75)
    assert DraftBudget(3, policy).at_most(2).chain_limits == (0.25, 0.5)
    policy.path_limits = None
    assert DraftBudget(3, policy).chain_limits is None
    shown: list[object] = []
    policy.may_extend = lambda n, logits: bool(shown.append((n, logits)))  # type: ignore[method-assign]
    assert not DraftBudget(3, policy).may_extend(2, "logits") and shown == [(2, "logits")]


@pytest.mark.parametrize("forest", [False, True])
def test_steps_survive_json(forest: bool) -> None:
    drafter = GuessDrafter(6, width=2) if forest else ModelDrafter(SMALL.score, SamplingParams(), Noise(0, "draft"), 6)
    for step in run([1, 2], target(), drafter, Fixed(3), 20):
        event = StepEvent(step, tuple(map(str, step.tokens)), tuple(map(str, step.draft.tokens)))
        line = json.loads(trace.write(event))
        assert step_of(line) == step
        assert trace.from_json(line, Metrics()) == replace(event, metrics=Metrics.of([step]))
        assert len(line["top"]) == len(line["p"]) == len(line["parents"]) == len(line["draft"])


def test_metrics_of_a_run_without_drafts_avoid_division_by_zero() -> None:
    figures = Metrics().as_dict()
    assert figures["acceptance_rate"] is None and figures["tokens_per_second"] is None
    figures = Metrics.of(run([1], target(), GuessDrafter(6), Fixed(1), 1)).as_dict()
    assert figures["tokens"] == 1 and figures["alpha"] is None and figures["tokens_per_target_pass"] is None
    assert figures["ttft_s"] is not None


def test_metrics_by_hand() -> None:
    """Two steps: accepted 2 of 3, then 0 of 2 with one token not tested."""
    verdict = Verdict((0, 1), 7, (0.9, 0.8, 0.1), (0.1, 0.2, 0.9), (0.9, 0.8, 0.1))
    first = Step(1, (1, 2, 7), Draft.chain((1, 2, 3)), verdict, 3, 0.1, 0.2, 0.1, t=1.0)
    verdict = Verdict((), 8, (0.2, 0.3), (0.7, None), (0.2, None))
    second = Step(2, (8,), Draft.chain((5, 6)), verdict, 3, 0.1, 0.2, 0.1, t=2.0)
    before = Metrics.of([PREFILL, first])
    figures = before.plus(second).as_dict()
    assert before == Metrics.of([PREFILL, first]) and before.drafted == 3  # a snapshot
    assert figures["drafted"] == 5 and figures["tested"] == 4 and figures["accepted"] == 2
    assert figures["acceptance_rate"] == pytest.approx(0.4) and figures["alpha"] == pytest.approx(0.5)
    assert figures["mean_beta"] == pytest.approx(0.5)
    assert figures["tokens_per_target_pass"] == pytest.approx(2.0)
    assert figures["accepted_by_position"] == [1, 1, 0] and figures["tested_by_position"] == [2, 1, 1]
    assert figures["ttft_s"] == 0.6 and figures["decode_s"] == pytest.approx(0.8)
    assert figures["tokens_per_second"] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("source", "first"),
    [
        (Source.TARGET, "accepted"),
        (Source.LATE, "accepted"),
        (Source.GATE, "unverified"),
        (Source.PROVISIONAL, "unverified"),
        (Source.ALONE, "unverified"),
    ],
)
def test_every_draft_token_has_an_outcome(source: Source, first: str) -> None:
    draft = Draft.chain((1, 2, 3))
    verdict = Verdict((0,), 7, (0.9, 0.1, 0.5), (0.1, 0.9, None), (0.9, 0.1, None), source=source)
    step = Step(1, (1, 7), draft, verdict, 3, 0.1, 0.2, 0.1, t=1.0)
    assert [step.outcome(node) for node in range(3)] == [first, "rejected", "ignored"]
    assert step.outcome(None) is step.kind
    assert step.kind is (Outcome.CORRECTION if first == "accepted" else Outcome.UNVERIFIED)
    metrics = Metrics.of([step])
    assert (metrics.accepted, metrics.unverified) == ((1, 0) if first == "accepted" else (0, len(step.tokens)))
    assert metrics.drafted == 3 and metrics.tested == 2


# Keys of `remote` in traces, presence of choices, source, `request_sent`: each kind of step that a run can write.
MEASURED = {"cloud_s": 0.5, "rtt_s": 0.25, "sent": 2.0, "rows": 1.0}
TRAFFIC = {"bytes_up": 300.0, "bytes_down": 200.0, "up_s": 0.125, "down_s": 0.0}
FATE = {"confirmed": 1.0, "overruled": 0.0}
REMOTE = [
    ({"escalated": 1.0, **MEASURED, **TRAFFIC}, True, Source.TARGET, True),
    ({"escalated": 1.0, **MEASURED, **FATE, **TRAFFIC, "hard_ratio": 0.0}, True, Source.TARGET, True),
    ({"escalated": 1.0, **MEASURED, **FATE, **TRAFFIC}, False, Source.LATE, False),
    ({"escalated": 1.0, "provisional": 1.0, **TRAFFIC}, False, Source.PROVISIONAL, True),
    ({"escalated": 1.0, "provisional": 1.0, **FATE, **TRAFFIC}, False, Source.PROVISIONAL, True),
    ({"escalated": 1.0, "provisional": 1.0, "pending": 1.0, **TRAFFIC}, False, Source.PROVISIONAL, False),
    ({"escalated": 0.0, "hard_ratio": 0.25}, False, Source.GATE, False),
    ({"escalated": 0.0, "edge": 1.0}, True, Source.ALONE, False),
    ({"escalated": 0.0, "edge": 1.0, "lost": 1.0, **FATE, **TRAFFIC}, False, Source.ALONE, False),
]


@pytest.mark.parametrize(("remote", "has_choices", "source", "request_sent"), REMOTE)
def test_link_measures_have_the_same_keys_in_traces(
    remote: dict[str, float], has_choices: bool, source: Source, request_sent: bool
) -> None:
    """An absent key stays absent; the sums of the metrics use the same names."""
    choices = ((7,), (7,)) if has_choices else ()
    verdict = Verdict((0,), None, (0.9,), (0.1,), (0.9,), choices, bound=(None,), link=LinkStats.of(remote))
    verdict = replace(verdict, source=source, request_sent=request_sent)
    step = Step(1, (1,), Draft.chain((1,)), verdict, 3, 0.1, 0.2, 0.1, t=1.0)
    line = trace.to_json(StepEvent(step, ("a",), ("a",)))
    assert line["remote"] == remote and all(type(value) is float for value in line["remote"].values())
    again = step_of(line)
    assert again == step and (again.verdict.source, again.verdict.request_sent) == (source, request_sent)
    metrics = Metrics.of([PREFILL, step])
    assert metrics.remote == remote and metrics.target_passes == request_sent
    assert (metrics.accepted, metrics.unverified) == ((1, 0) if source in (Source.TARGET, Source.LATE) else (0, 1))
