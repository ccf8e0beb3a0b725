"""Gates, late answers and lost clouds: what is taken without the target's word, and how that is told."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from fakes.enumeration import PROMPT, SMALL, TARGET, VOCAB
from fakes.remote import Direct, contexts, settings
from fakes.tiny_models import committed, run, tiny_model

from specdemo.core import trace
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.model import ModelDrafter
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_variants import with_dropout
from specdemo.recipe import Recipe
from specdemo.remote.client import ConnectionLost, Deadlines, RemoteVerifier
from specdemo.remote.config import CloudConfig
from specdemo.remote.gates import (
    AlwaysVerify,
    GatedVerifier,
    RecordingPolicy,
    document_frequency,
    hard,
    mc_dropout,
    signals,
)
from specdemo.remote.transport import NoResponse

GREEDY = SamplingParams(temperature=0)


def small_text(count: int) -> list[int]:
    """What the drafter writes by itself, greedily."""
    text = list(PROMPT)
    for _ in range(count):
        text.append(int(SMALL.logits(text).argmax()))
    return text[len(PROMPT) :]


def target_text(count: int) -> list[int]:
    text = list(PROMPT)
    for _ in range(count):
        text.append(int(TARGET.logits(text).argmax()))
    return text[len(PROMPT) :]


# --- gates -------------------------------------------------------------------------------------------------------


def test_signals_are_what_their_names_say() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]])
    found = signals(list(probs.log()), Draft.chain((1, 3)))
    assert found["nll"] == pytest.approx([math.log(4), math.log(4)])
    assert found["entropy"] == pytest.approx([1.75, 2.0])
    assert found["margin"] == pytest.approx([0.25, 0.0])
    assert hard(found, {"entropy": 1.8}) == [0, 1] and hard(found, {"margin": 0.2}) == [0, 1]
    assert hard(found, {"nll": 1.3, "entropy": 9}) == [1, 1] and hard(found, {}) == []


def gated(thresholds: dict[str, float], most_hard: float = 0.3, **options: Any) -> tuple[list[Any], Direct]:
    http = Direct(contexts())
    gauge = RecordingPolicy(Fixed(2))
    verifier = GatedVerifier(RemoteVerifier(http, settings(GREEDY)), gauge, thresholds, most_hard, **options)
    drafter = ModelDrafter(SMALL.score, GREEDY, Noise(0, "draft"), VOCAB, extend=SMALL.extend)
    return run(PROMPT, verifier, drafter, gauge, 13), http


def test_a_gate_that_finds_everything_hard_leaves_the_targets_text() -> None:
    steps, http = gated({"nll": 0.0})
    assert committed(steps) == target_text(13)
    assert all(step.verdict.notes["escalated"] == 1 for step in steps)
    assert [message.hard_mask for message in http.sent if message.k] == [[1] * n.k for n in http.sent if n.k]


def test_a_gate_that_finds_nothing_hard_leaves_the_drafters_text() -> None:
    steps, http = gated({"nll": math.inf, "margin": -1.0})
    first, *rest = committed(steps)
    assert [first] == target_text(1)  # the prefill has nothing to take
    text = [*PROMPT, first]
    for token in rest[:-1]:
        assert token == int(SMALL.logits(text).argmax())
        text.append(token)
    asked = [step for step in steps if step.verdict.notes["escalated"]]
    assert len(http.sent) == len(asked) < len(steps) and all(not step.draft for step in asked)
    taken = next(step for step in steps if not step.verdict.notes["escalated"])
    line = trace.to_json(StepEvent(taken, ("a", "b"), ("a", "b")))
    assert line["p"] == [None, None] and line["top"] == [None, None] and line["remote"]["hard_ratio"] == 0
    assert trace.step_from_json(line) == taken


def test_between_them_it_saves_calls_and_costs_agreement() -> None:
    saved = []
    for limit in (0.0, 0.5, 1.0, math.inf):
        steps, http = gated({"nll": limit})
        saved.append(len(http.sent))
    assert saved[0] > saved[-1] and saved == sorted(saved, reverse=True)


def test_rules_that_always_ask() -> None:
    assert AlwaysVerify(["numbers"])("in 1999") and not AlwaysVerify(["numbers"])("in a year")
    assert AlwaysVerify(["names"])("of Paris") and not AlwaysVerify(["names"])("of paris, 1")
    seen = document_frequency(["Common word", "common sense", "common rare_one"])
    assert seen == Counter({"common": 3, "word": 1, "sense": 1, "rare": 1, "one": 1})
    assert AlwaysVerify(["rare"], seen)("a word") and not AlwaysVerify(["rare"], seen)("Common")
    steps, _ = gated({}, always=lambda tokens, draft: True)
    assert committed(steps) == target_text(13)
    steps, _ = gated({}, always=lambda tokens, draft: 1 in draft.tokens)
    for step in steps:
        assert step.verdict.notes["escalated"] == (not step.draft or 1 in step.draft.tokens)


def test_dropout_varies_what_is_unsure_and_nothing_without_it() -> None:
    model = LlamaWeights(tiny_model("llama"))
    tokens, draft = [1, 2, 3], Draft.chain((4, 5, 6))
    silent = mc_dropout([CachedModel(with_dropout(model, seed, share=0.0)).score for seed in range(3)])
    assert silent(tokens, draft) == [0.0, 0.0, 0.0]
    varied = mc_dropout([CachedModel(with_dropout(model, seed)).score for seed in range(3)])(tokens, draft)
    assert len(varied) == 3 and all(0 < value <= 0.25 for value in varied)
    whole = CachedModel(model).score(tokens, draft)
    assert torch.equal(whole, CachedModel(with_dropout(model, 0, share=0.0)).score(tokens, draft))
    with pytest.raises(UserError, match="Llama family"):
        with_dropout(tiny_model("gpt2"), 0)


# --- late answers ------------------------------------------------------------------------------------------------


class Held(Direct):
    """Answers that are held back until they are let go."""

    def __init__(self) -> None:
        super().__init__(contexts())
        self.free = threading.Event()
        self.free.set()

    def call(self, *args: Any) -> Any:
        self.free.wait()
        return super().call(*args)


def late_judge(http: Direct) -> RemoteVerifier:
    return RemoteVerifier(http, settings(GREEDY), patience=Deadlines(deadline_s=0.3, strict=False))


def test_past_the_deadline_one_drafted_token_is_taken_and_said_to_be_provisional() -> None:
    http = Held()
    verifier, right = late_judge(http), target_text(8)
    text = list(PROMPT)
    assert verifier.verify(text, Draft()).token == right[0]
    text.append(right[0])
    http.free.clear()
    verdict = verifier.verify(text, Draft.chain(tuple(right[1:4])))
    assert verdict.accepted == (0,) and verdict.token is None and verdict.notes["provisional"] == 1
    assert verdict.p == (None,) * 3
    text.append(right[1])
    http.free.set()  # the answer comes: it agrees, and says how the text goes on
    sent = len(http.sent)
    verdict = verifier.verify(text, Draft.chain((right[2], right[3], (right[4] + 1) % VOCAB)))
    assert verdict.notes["confirmed"] == 1 and verdict.notes["overruled"] == 0 and len(http.sent) <= sent + 1
    assert verdict.accepted == (0, 1) and verdict.token == right[4]
    text += [right[2], right[3], right[4]]
    assert verifier.verify(text, Draft()).token == right[5]


def test_a_provisional_token_that_the_target_would_not_have_written_is_counted() -> None:
    http = Held()
    verifier, right = late_judge(http), target_text(2)
    text = list(PROMPT)
    text.append(verifier.verify(text, Draft()).token)
    http.free.clear()
    wrong = (right[1] + 1) % VOCAB
    assert verifier.verify(text, Draft.chain((wrong,))).accepted == (0,)
    text.append(wrong)
    http.free.set()
    verdict = verifier.verify(text, Draft())  # the text stays; both ends hold it
    assert verdict.notes["overruled"] == 1 and verdict.notes["confirmed"] == 0
    assert verdict.token == int(TARGET.logits(text).argmax())
    assert http.sent[-1].tokens == [wrong]


def test_a_late_cloud_in_strict_mode_is_waited_for() -> None:
    http = Held()
    verifier = RemoteVerifier(http, settings(GREEDY), patience=Deadlines(deadline_s=0.3))
    http.free.clear()
    threading.Timer(0.0, http.free.set).start()
    drafter = ModelDrafter(SMALL.score, GREEDY, Noise(0, "draft"), VOCAB)
    assert committed(run(PROMPT, verifier, drafter, Fixed(2), 12)) == target_text(12)


# --- lost clouds -------------------------------------------------------------------------------------------------


class Dying(Direct):
    """Answers so many rounds, then none."""

    def __init__(self, rounds: int) -> None:
        super().__init__(contexts())
        self.rounds = rounds

    def call(self, *args: Any) -> Any:
        if len(self.sent) >= self.rounds:
            raise NoResponse("nobody there")
        return super().call(*args)


def test_a_cloud_that_is_lost_ends_the_run_or_leaves_it_to_the_edge() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    quick = {"clock": clock, "pause": lambda seconds: None, "patience": Deadlines(lost_s=20)}
    drafter = ModelDrafter(SMALL.score, GREEDY, Noise(0, "draft"), VOCAB)
    with pytest.raises(ConnectionLost, match=r"has not answered for \d+ seconds \(nobody there\)"):
        run(PROMPT, RemoteVerifier(Dying(2), settings(GREEDY), **quick), drafter, Fixed(2), 12)
    edge = ModelVerifier(SMALL.score, GREEDY, rejection, Noise(0, "accept"), Noise(0, "edge"))
    steps = run(PROMPT, RemoteVerifier(Dying(2), settings(GREEDY), edge=edge, **quick), drafter, Fixed(2), 12)
    lost = [step.verdict.notes.get("lost", 0.0) for step in steps]
    assert sum(lost) == 1 and len(committed(steps)) == 12
    before = steps[: lost.index(1.0)]
    text = [*PROMPT, *committed(before)]
    assert committed(before) == target_text(len(committed(before))) and before
    for token in committed(steps[lost.index(1.0) :]):
        assert token == int(SMALL.logits(text).argmax())
        text.append(token)
    nobody = RemoteVerifier(Dying(0), settings(GREEDY), edge=edge, **quick)
    assert committed(run(PROMPT, nobody, drafter, Fixed(2), 8)) == small_text(8)


# --- choices -----------------------------------------------------------------------------------------------------

URL = "http://cloud:8300"


@pytest.mark.parametrize(
    ("cloud", "recipe", "exact"),
    [
        ({}, {}, True),
        ({}, {"temperature": 0.0}, True),
        ({"q_rows": "float16"}, {}, False),
        ({"q_rows": "scalar"}, {}, False),
        ({"q_rows": "scalar"}, {"temperature": 0.0}, True),
        ({"q_rows": "scalar"}, {"method": "nasd"}, True),
        ({"q_rows": "scalar"}, {"rule": "coupled"}, True),
        ({"provisional": True}, {}, False),
        ({"gates": ("nll",)}, {}, False),
        ({"on_loss": "edge"}, {}, False),
        ({"mode": "cloud_only"}, {"rule": "top1"}, True),
        ({"mode": "edge_only"}, {}, False),
        ({}, {"rule": "top1"}, False),
        ({}, {"skip_sample_adjustment": True}, False),
    ],
)
def test_every_lossy_choice_is_called_so(cloud: dict[str, Any], recipe: dict[str, Any], exact: bool) -> None:
    assert Recipe(cloud=CloudConfig(URL, **cloud), **recipe).exact == exact


@pytest.mark.parametrize(
    ("cloud", "recipe", "sentence"),
    [
        ({"remote": "cloud:8300"}, {}, "give http://host:port"),
        ({"mode": "magic"}, {}, "known are speculative"),
        ({"q_rows": "magic"}, {}, "known are float32"),
        ({"gates": ("magic",)}, {}, "known are nll"),
        ({"loss": 1.0}, {}, "loss must be from 0 to 0.9"),
        ({"rtt_ms": math.nan}, {}, "rtt_ms must be"),
        ({}, {"method": "self"}, "target itself at hand"),
        ({}, {"method": "beam"}, "target itself at hand"),
        ({"on_loss": "edge"}, {"method": "nasd"}, "could go on alone"),
        ({"gates": ("nll",)}, {"method": "tree"}, "choose method draft"),
        ({"provisional": True}, {"method": "ar"}, "drafts nothing"),
    ],
)
def test_choices_that_cannot_be_meant_are_refused(cloud: dict[str, Any], recipe: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Recipe(cloud=CloudConfig(**{"remote": URL, **cloud}), **recipe)


def test_one_end_by_itself_is_plain_decoding_there() -> None:
    here = Recipe(cloud=CloudConfig(URL, mode="edge_only"), temperature=0.0)
    assert here.running.method == "ar" and here.running.cloud is None
    assert here.running.models[0] == here.models[1] and here.running.temperature == 0
    there = Recipe(cloud=CloudConfig(URL, mode="cloud_only")).running
    assert there.method == "ar" and there.cloud is not None and there.models == here.models
