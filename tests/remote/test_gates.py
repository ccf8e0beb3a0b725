"""Gates, late responses and lost connections: tokens committed without the target."""

import math
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.enumeration import PROMPT, SMALL, TARGET, VOCAB
from fakes.remote import DirectClient, contexts, remote_verifier, verify_config
from fakes.tiny_models import committed, run, tiny_model

from specdemo.core import trace
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Source, Step, Verdict
from specdemo.core.step_record import step_of
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ModelDrafter
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.generate import generate
from specdemo.models.engines.llama_weights import LlamaWeights, with_dropout
from specdemo.models.kv_cache import CachedModel
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.config import CloudConfig
from specdemo.remote.connection import ConnectionLost, Deadlines
from specdemo.remote.gates import (
    EdgeVerifier,
    GatedVerifier,
    RecordingPolicy,
    document_frequency,
    hard_tokens,
    mc_dropout,
    signals,
    word_counts,
    word_rules,
)
from specdemo.remote.link import Retry
from specdemo.remote.target import RemoteVerifier

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0)


def greedy_text(model: Any, count: int, start: Sequence[int] = PROMPT) -> list[int]:
    """Return the greedy continuation of `start`."""
    text = list(start)
    for _ in range(count):
        text.append(int(model.logits(text).argmax()))
    return text[len(start) :]


def target_text(count: int) -> list[int]:
    return greedy_text(TARGET, count)


# --- gates -------------------------------------------------------------------------------------------------------


def test_signals_match_their_definitions() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]])
    values = signals(list(probs.log()), Draft.chain((1, 3)))
    assert values["nll"] == pytest.approx([math.log(4), math.log(4)])
    assert values["entropy"] == pytest.approx([1.75, 2.0])
    assert values["margin"] == pytest.approx([0.25, 0.0])
    assert hard_tokens(values, {"entropy": 1.8}) == [0, 1] and hard_tokens(values, {"margin": 0.2}) == [0, 1]
    assert hard_tokens(values, {"nll": 1.3, "entropy": 9}) == [1, 1] and hard_tokens(values, {}) == []


def gated(
    thresholds: dict[str, float], max_hard: float = 0.3, drafter: Any = None, **options: Any
) -> tuple[list[Any], DirectClient]:
    http = DirectClient(contexts())
    recorder = RecordingPolicy(Fixed(2))
    verifier = GatedVerifier(remote_verifier(http, verify_config(GREEDY)), recorder, thresholds, max_hard, **options)
    drafter = drafter or ModelDrafter(SMALL.score, GREEDY, Noise(0, "draft"), VOCAB, extend=SMALL.extend)
    return run(PROMPT, verifier, drafter, recorder, 13), http


def test_gate_with_all_tokens_hard_gives_the_target_text() -> None:
    steps, http = gated({"nll": 0.0})
    assert committed(steps) == target_text(13) and all(step.verified for step in steps)
    assert [r.hard_mask for r in http.sent if r.k] == [[1] * r.k for r in http.sent if r.k]


def test_gate_without_hard_tokens_gives_the_drafter_text() -> None:
    steps, http = gated({"nll": math.inf, "margin": -1.0})
    first, *rest = committed(steps)
    assert [first] == target_text(1)  # the prefill requires the target
    assert rest[:-1] == greedy_text(SMALL, len(rest) - 1, [*PROMPT, first])
    escalated = [step for step in steps if step.verified]
    assert len(http.sent) == len(escalated) < len(steps) and all(not step.draft for step in escalated)
    unverified = next(step for step in steps if step.verdict.source is Source.GATE)
    line = trace.to_json(StepEvent(unverified, ("a", "b"), ("a", "b")))
    assert line["p"] == [None, None] and line["top"] == [None, None] and line["remote"]["hard_ratio"] == 0
    assert step_of(line) == unverified
    assert line["kind"] == "unverified" and step_of(line | {"kind": "bonus"}) == unverified  # as in older traces
    assert Metrics.of(steps).unverified == sum(len(step.tokens) for step in steps if not step.verified) > 0


def test_rules_verify_texts_with_their_words() -> None:
    """Texts copied without signals are verified, too."""
    for options in ({"thresholds": {}}, {"thresholds": {"nll": math.inf}, "drafter": SuffixDrafter()}):
        steps, _ = gated(**options, always=lambda tokens, draft: True)
        assert committed(steps) == target_text(13) and any(step.draft.tokens for step in steps)
    steps, _ = gated({}, always=lambda tokens, draft: 1 in draft.tokens)
    assert all(step.verified == (not step.draft or 1 in step.draft.tokens) for step in steps)
    steps, _ = gated({}, always=lambda tokens, draft: False, drafter=SuffixDrafter())
    assert all(step.verified != bool(step.draft.tokens) for step in steps)


def test_dropout_variance_is_zero_without_dropout() -> None:
    model = LlamaWeights(tiny_model("llama"))
    tokens, draft = [1, 2, 3], Draft.chain((4, 5, 6))
    constant = mc_dropout([CachedModel(with_dropout(model, seed, share=0.0)).score for seed in range(3)])
    assert constant(tokens, draft) == [0.0, 0.0, 0.0]
    varied = mc_dropout([CachedModel(with_dropout(model, seed)).score for seed in range(3)])(tokens, draft)
    assert len(varied) == 3 and all(0 < value <= 0.25 for value in varied)
    full = CachedModel(model).score(tokens, draft)
    assert torch.equal(full, CachedModel(with_dropout(model, 0, share=0.0)).score(tokens, draft))
    assert with_dropout(model, 0).embedding is model.embedding  # which may take gigabytes
    with pytest.raises(UserError, match="Llama family"):
        with_dropout(tiny_model("gpt2"), 0)


# --- late responses ----------------------------------------------------------------------------------------------


class DelayedClient(DirectClient):
    """Delay responses until `free` is set."""

    def __init__(self) -> None:
        super().__init__(contexts())
        self.free = threading.Event()
        self.free.set()

    def call(self, *args: Any) -> Any:
        self.free.wait()
        return super().call(*args)


def late_verifier(http: DirectClient) -> RemoteVerifier:
    return remote_verifier(http, verify_config(GREEDY), deadlines=Deadlines(deadline_s=0.3, strict=False))


def test_first_draft_token_is_provisional_after_the_deadline() -> None:
    http = DelayedClient()
    verifier, expected = late_verifier(http), target_text(8)
    text = list(PROMPT)
    links = []

    def verify(*draft: int) -> Verdict:
        verdict = verifier.verify(text, Draft.chain(draft))
        links.append(verdict.link)
        text.extend([*(draft[node] for node in verdict.accepted), *verdict.target_tokens])
        return verdict

    assert verify().token == expected[0]
    http.free.clear()
    verdict = verify(*expected[1:4])
    assert verdict.accepted == (0,) and verdict.token is None and verdict.source is Source.PROVISIONAL
    assert verdict.p == (None,) * 3 and verdict.request_sent
    step = Step(1, (expected[1],), Draft.chain(tuple(expected[1:4])), verdict, 3, 0.1, 0.1, 0.1, 1.0)
    assert step.kind == "unverified" and (Metrics.of([step]).unverified, Metrics.of([step]).accepted) == (1, 0)
    http.free.set()  # the response agrees and determines the next tokens
    sent = len(http.sent)
    verdict = verify(expected[2], expected[3], (expected[4] + 1) % VOCAB)
    assert verdict.source is Source.LATE and (verdict.link.confirmed, verdict.link.overruled) == (1, 0)
    assert len(http.sent) <= sent + 1
    assert verdict.accepted == (0, 1) and verdict.token == expected[4]
    assert verify().token == expected[5] and text[len(PROMPT) :] == expected[:6]
    # Every request is measured in a step, that of the provisional step in a later one.
    assert sum(link.sent or 0 for link in links) == len(http.sent)
    assert sum(link.bytes_up for link in links) == sum(len(http.codec.dump(message)) for message in http.sent)
    assert sum(link.bytes_down for link in links) == sum(len(http.codec.dump(message)) for message in http.responses)


def test_only_the_first_difference_is_overruled() -> None:
    """Provisional tokens after a wrong token were not verified in their own context."""
    http = DelayedClient()
    verifier, expected = late_verifier(http), target_text(4)
    text = [*PROMPT, verifier.verify(list(PROMPT), Draft()).token]
    http.free.clear()
    wrong = (expected[2] + 1) % VOCAB
    for draft in (tuple(expected[1:4]), (wrong,), (expected[3],)):
        verdict = verifier.verify(text, Draft.chain(draft))
        text += [draft[0]]
    assert verdict.source is Source.PROVISIONAL and not verdict.request_sent  # waits for the first request
    http.free.set()
    verdict = verifier.verify(text, Draft())
    assert (verdict.link.confirmed, verdict.link.overruled) == (1, 1)


# --- lost connections --------------------------------------------------------------------------------------------


class FailingClient(DirectClient):
    """Respond to a number of requests, then fail."""

    def __init__(self, requests: int) -> None:
        super().__init__(contexts())
        self.requests = requests

    def call(self, *args: Any) -> Any:
        if len(self.sent) >= self.requests:
            raise Retry("unreachable")
        return super().call(*args)


def test_lost_connection_ends_the_run_or_continues_at_the_edge() -> None:
    clock = count(1.0, 0.1).__next__

    def decode(requests: int, **more: Any) -> list[Step]:
        options = {"clock": clock, "sleep": lambda seconds: None, "deadlines": Deadlines(lost_s=20), **more}
        drafter = ModelDrafter(SMALL.score, GREEDY, Noise(0, "draft"), VOCAB)
        verifier = remote_verifier(FailingClient(requests), verify_config(GREEDY), **options)
        return run(PROMPT, verifier, drafter, Fixed(2), 12)

    with pytest.raises(ConnectionLost, match=r"has made no progress for \d+ s \(unreachable\)"):
        decode(2)
    edge = EdgeVerifier(ModelVerifier(SMALL.score, GREEDY, rejection, Noise(0, "accept"), Noise(0, "edge")))
    steps = decode(2, edge=edge)
    lost = [step.lost for step in steps]
    assert sum(lost) == 1 and len(committed(steps)) == 12
    before, alone = committed(steps[: lost.index(True)]), committed(steps[lost.index(True) :])
    assert before and before == target_text(len(before))
    assert alone == greedy_text(SMALL, len(alone), [*PROMPT, *before])
    assert committed(decode(0, edge=edge)) == greedy_text(SMALL, 12)


# --- choices -----------------------------------------------------------------------------------------------------

URL = "http://cloud:8300"


CHOICES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [  # options of the cloud and the run, exact
    ({}, {}, True),
    ({"q_rows": "scalar"}, {}, False),
    ({"q_rows": "scalar"}, {"temperature": 0.0}, True),
    ({"provisional": True}, {}, False),
    ({"gates": ("nll",)}, {}, False),
    ({"on_loss": "edge"}, {}, False),
    ({"mode": "cloud_only"}, {"rule": "top1"}, True),
]


def test_lossy_options_are_reported() -> None:
    for cloud, recipe, exact in CHOICES:
        assert plan_run(Recipe(cloud=CloudConfig(URL, **cloud), **recipe)).exact == exact, (cloud, recipe)


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"remote": "http://a:1 http://a:1/"}, {}, "at most 16 different addresses"),
    ({"mode": "magic"}, {}, "known are speculative"),
    ({"gate_rare": 9}, {}, "has no effect without gate rare"),
    ({"rtt_ms": math.nan}, {}, "rtt_ms must be"),
    ({}, {"method": "self"}, "needs a local target"),
    ({"on_loss": "edge"}, {"method": "nasd"}, "could continue alone"),
    ({"gates": ("nll",)}, {"method": "tree"}, "choose method draft"),
    ({"provisional": True}, {"method": "ar"}, "has no drafts"),
]


def test_options_that_contradict_each_other_are_refused() -> None:
    for cloud, recipe, sentence in WRONG:
        with pytest.raises(UserError, match=sentence):
            Recipe(cloud=CloudConfig(**{"remote": URL, **cloud}), **recipe)


# --- rules about words ------------------------------------------------------------------------------------------------


class Letters:
    """Tokenizer with a token per character."""

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


def verified(text: str, gates: tuple[str, ...], before: str = "x ", **more: Any) -> bool:
    names = more.pop("names", None)
    rules = word_rules(Letters(), CloudConfig("http://a:1", gates=gates, **more), names)
    return rules([*map(ord, before)], Draft.chain(tuple(map(ord, text))))


WORDS = {  # rule: texts that it verifies and does not
    "numbers": ("in 1999", "in a year"),
    "months": (" in March", " to march in mayhem"),
    "names": ("of Paris", "of paris, 1"),
    "amounts": (" twelve euros", " once upon a time, 99 days"),
}


@pytest.mark.parametrize("rule", WORDS)
def test_a_rule_requires_verification(rule: str) -> None:
    """Only drafted text is tested."""
    if rule == "amounts":
        pytest.importorskip("text_to_num")
    hit, miss = WORDS[rule]
    assert verified(hit, (rule,)) and not verified(miss, (rule,)) and verified(hit, ("months", "numbers", rule))
    assert not verified("of paris", ("numbers", "months"), before="1 May ")


def test_names_are_recognised_by_a_function_of_the_caller() -> None:
    def phones(text: str) -> bool:
        return "iPhone" in text

    assert verified("an iPhone", ("names",), names=phones) and not verified("The end", ("names",), names=phones)
    for chosen in (Recipe(pair="bundled", cloud=CloudConfig(URL, gates=("rare",))), Recipe(pair="bundled")):
        with pytest.raises(UserError, match="names has no effect without gate names"):
            next(generate(chosen, "x", names=phones))


def test_rarity_is_read_from_a_frequency_list(tmp_path: Path) -> None:
    counts = document_frequency(["Common word", "common sense", "common rare_one"])
    assert counts == Counter({"common": 3, "word": 1, "sense": 1, "rare": 1, "one": 1})
    path = tmp_path / "words.txt"
    path.write_text("the 900\nhouse\t40\nHouse 2\ntower,7\n\n", "utf-8")
    assert word_counts(path) == Counter({"the": 900, "house": 42, "tower": 7})
    listed = {"word_frequencies": str(path), "gate_rare": 42}
    assert not verified("the house", ("rare",), **listed) and verified("the tower", ("rare",), **listed)
    assert not verified("the tower", ("rare",), **{**listed, "gate_rare": 7}) and verified("a", ("rare",), **listed)
    for content, words in ((b"the 9\nx y z\n", "line 2 of"), (b"\xff 1", "no readable list")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            word_counts(path)


def test_amounts_name_their_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "text_to_num", None)
    with pytest.raises(UserError, match="pip install text2num"):
        word_rules(Letters(), CloudConfig("http://a:1", gates=("amounts",)))
