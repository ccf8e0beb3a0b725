"""Values in inspector, table, charts and the saved page equal the trace; origins of guesses."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import random
import re
from typing import Any

import pytest
from fakes.trace_records import ALL_KEPT, CUT, PREFILL, REJECTION, absorb, end, header, step, whole

from specdemo.ui import step_views as rounds
from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC, Lane
from specdemo.ui.run_store import RunStore
from specdemo.ui.step_views import step_picture, step_pictures
from specdemo.ui.web_page import web_page


def lane(*lines: dict, **recipe: Any) -> Lane:
    run = Run()
    made = header()
    made["recipe"] = made["recipe"] | {"rule": "rejection", "temperature": 1.0} | recipe
    made["environment"] = made["environment"] | {"parity": {"cost": {"1": 1.0, "2": 1.0, "5": 1.1, "8": 1.4}}}
    absorb(run, SPEC, made, *lines, end())
    return run.lanes[SPEC]


def probs(**top: float) -> dict:
    """Distribution over tokens named a, b, c, ..."""
    return {"entropy": 0.5, "top": [[ord(name), p] for name, p in top.items()]}


TEXTS = {"texts": {str(ord(name)): name for name in "abcdX"}}
# the draft is b, c, d; b is accepted, c is rejected
LAWS = {
    "laws": [probs(b=0.5, a=0.3, c=0.2), probs(X=0.7, c=0.2, d=0.1), probs(a=1.0), probs(a=1.0)],
    "drafted": [probs(b=0.25, a=0.75), probs(c=0.6, X=0.4), probs(d=1.0)],
}
SEEN = REJECTION | LAWS | TEXTS | {"draft": [ord("b"), ord("c"), ord("d")], "draw": [0.1, 0.9, None]}


def test_step_picture_equals_the_trace() -> None:
    found = rounds.step_picture(lane(PREFILL, SEEN), 1)
    assert found is not None
    assert (found["i"], found["rounds"], found["chain"], found["path"]) == (1, 2, True, [0])
    assert [node["state"] for node in found["nodes"]] == ["accepted", "rejected", "ignored"]
    for n, node in enumerate(found["nodes"]):
        assert (node["p"], node["q"], node["draw"], node["beta"]) == (
            SEEN["p"][n], SEEN["q"][n], SEEN["draw"][n], SEEN["beta"][n],
        )  # fmt: skip
        assert node["bound"] == (1.0 if SEEN["draw"][n] is not None else None)
    assert found["nodes"][0]["bars"] == [("a", 0.3, 0.75), ("b", 0.5, 0.25), ("c", 0.2, 0.0)]
    assert found["times"] == {"draft": 0.01, "verify": 0.02, "host": 0.0} and found["t"] == SEEN["t"]
    assert found["words"] == "Drafted 3, accepted 1, committed 2."


@pytest.mark.parametrize(
    ("change", "recipe", "words"),
    [
        ({"p": [0.1] * 3, "q": [0.5] * 3, "draw": [0.1, 0.62, None]}, {}, "the draw 0.620 is not below p/q = 0.200."),
        ({"p": [0.4] * 3, "q": [0.5] * 3, "draw": [0.1, 0.62, None]}, {}, "the draw 0.100 is below p/q = 0.800."),
        ({"p": [0.6] * 3, "q": [0.5] * 3}, {}, "Accepted for any draw: p/q is at least 1."),
        ({"q": None, "p": [0.4] * 3, "draw": [0.1, 0.62, None]}, {}, "the draw 0.620 is not below p/q = 0.400."),
        ({}, {"temperature": 0.0}, "Rejected: it is not the target's most probable token."),
        ({}, {"rule": "match"}, "Accepted: the target sampled the same token."),
        ({}, {"rule": "coupled"}, "Rejected: with the shared noise, the target sampled another token."),
        ({"draw": [None] * 3, "bound": [0.09, 0.7, None]}, {"rule": "typical"}, "reaches the rule's bound 0.090"),
        ({"draw": [0.1, 0.62, None], "bound": [1.0, 0.4, None]}, {"rule": "lenient"}, "not below min(1, p/(l q))"),
        ({"p": [1.0, 0, 0]}, {"rule": "lenient", "temperature": 0.0}, "Accepted: it is the target's most probable"),
        ({"p": [0.0, 0, 0]}, {"rule": "lenient", "temperature": 0.0}, "its probability reaches the threshold"),
        ({}, {}, "Not tested: an earlier draft token was rejected."),
        ({"p": [None] * 3}, {}, "Accepted by a late response of the cloud."),
        ({"p": [None] * 3}, {}, "Discarded: a late response of the cloud accepted fewer tokens."),
    ],
)  # fmt: skip
def test_outcomes_are_explained_with_numbers(change: dict, recipe: dict, words: str) -> None:
    found = rounds.step_picture(lane(PREFILL, REJECTION | change, **recipe), 1)
    assert any(words in node["words"] for node in found["nodes"])


@pytest.mark.parametrize("i", [-1, 2, 10**9])
def test_unknown_step_is_not_shown(i: int) -> None:
    assert rounds.step_picture(lane(PREFILL, SEEN), i) is None


def test_table_equals_the_metrics() -> None:
    made = lane(PREFILL, REJECTION, ALL_KEPT, CUT)
    rows, m = rounds.step_table(made), made.metrics.as_dict()
    column = dict(zip(rounds.STEP_COLUMNS, zip(*rows, strict=True), strict=True))
    assert sum(column["drafted"]) == m["drafted"] and sum(column["tested"]) == m["tested"]
    assert sum(column["accepted"]) == m["accepted"] and sum(column["committed"]) == m["tokens"]
    assert sum(column["draft_ms"][1:]) / 1000 == pytest.approx(m["draft_s"])
    assert "".join(column["text"]) == "".join(event.text for event in made.steps)


def test_the_csv_is_the_table_and_no_formula() -> None:
    made = lane(PREFILL, step(1, pieces=["=1+1\n"]))
    head, *rows = csv.reader(io.StringIO(rounds.as_csv(made)))
    assert tuple(head) == rounds.STEP_COLUMNS and len(rows) == 2
    assert json.loads(rows[1][-1]) == "=1+1\n" and not rows[1][-1].startswith("=")


def test_what_if_is_calibrated_on_the_measured_lanes() -> None:
    """Gamma 0 is the speed of the AR lane; a run outside the range of its own gamma gets no advice."""
    made, plain = (
        lane(PREFILL, REJECTION, ALL_KEPT),
        lane(PREFILL, *(step(i, pieces=["a"]) for i in (1, 2)), method="ar"),
    )
    found = rounds.figures(made, plain)["what_if"]
    assert found["rows"][0][2] == pytest.approx(plain.metrics.tokens_per_second, abs=1e-3)
    other = lane(PREFILL, step(1, pieces=["a"]), target="other")
    assert rounds.figures(made, other)["what_if"]["rows"][0] != found["rows"][0]
    gamma, _, speed, low, high = found["rows"][3]
    assert gamma == found["gamma"] and found["fits"] == (low <= made.metrics.tokens_per_second <= high)
    rejected = [
        REJECTION | {"i": i, "tokens": [1], "pieces": ["X"], "accepted": [], "beta": [1.0, None, None]}
        for i in range(1, 30)
    ]
    assert rounds.figures(lane(PREFILL, *rejected))["what_if"]["fits"] is False  # beta does not describe the outcomes


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_step_player_does_not_change_decisions_of_lenient_rules(temperature: float) -> None:
    """Its bounds have no threshold."""
    event = lane(PREFILL, REJECTION).steps[1]
    assert rounds.decision_kind(event.step, {"rule": "lenient", "temperature": temperature}) == "none"
    assert rounds.decision_kind(event.step, {"rule": "rejection", "temperature": 0.7}) == "draw"


MARKUP = "</script><img src=x onerror=alert(1)>"


def shown(text: str | bytes) -> Any:
    """Parse JSON with the decimals that the page shows."""
    return json.loads(text, parse_float=lambda number: round(float(number), 3))


def test_saved_page_contains_the_frame_and_all_steps() -> None:
    run = whole(Run())
    run.finish()
    packed = re.search(r'id="run-data">([^<]*)<', web_page(run))
    assert packed is not None
    data = shown(gzip.decompress(base64.b64decode(packed[1])))
    assert data["frame"] == shown(run.frame(0))
    assert data["steps"] == {SPEC: shown(json.dumps(step_pictures(run.lanes[SPEC])))}


def test_texts_of_a_saved_page_are_no_markup() -> None:
    run = Run()
    recipe = {"method": "draft", "gamma": 3, "temperature": 0.0, "pair": MARKUP, "seed": MARKUP}
    absorb(run, SPEC, header(prompt=MARKUP, recipe=recipe), step(0, pieces=[MARKUP]), end())
    run.finish()
    assert MARKUP not in web_page(run)


def test_only_finished_runs_are_saved() -> None:
    store = RunStore()
    run = store.new("visitor", (SPEC,))
    assert store.web_page(run.id) is None and store.web_page("unknown") is None and store.web_page([run.id]) is None
    whole(run)
    run.finish()
    assert (store.web_page(run.id) or "").startswith("<!doctype html>")


PROMPT = {"prompt": "ab abc ", "prompt_tokens": [1, 2, 3, 1, 2, 4, 3]}  # a, b, space, a, b, c, space
NAMES = {"texts": {"1": "a", "2": "b", "3": " ", "4": "c"}}


def copied(*lines: dict, **recipe: Any) -> Lane:
    run = Run()
    made = header(**PROMPT)
    made["recipe"] = made["recipe"] | {"method": "nasd", "ngram": 4} | recipe
    absorb(run, SPEC, made, *lines, end())
    return run.lanes[SPEC]


def guess(*origin: dict, draft: tuple[int, ...] = (4,), texts: tuple[str, ...] = ("c",)) -> dict:
    line = step(1, pieces=["X"], draft=texts, accepted=(), tested=1)
    return line | NAMES | {"tokens": [9], "draft": list(draft), "origin": list(origin)}


FIRST = step(0, pieces=["a", "b"]) | {"tokens": [1, 2]}


def test_the_latest_match_of_the_context_is_the_source() -> None:
    origin = {"source": "n-gram", "order": 3, "count": 2}
    found = step_picture(copied(FIRST, guess(origin)), 1)["source"]
    text = "ab abc ab"
    assert found["words"] == (
        "Copied from the prompt: the last 2 tokens occurred there (order 3, after backoff from order 4). "
        "It occurred 2 times."
    )
    assert [text[start:end] for start, end in found["copied"]] == ["c"] and found["copied"] == [(5, 6)]
    assert found["context"] == [(3, 5), (7, 9)] and found["excerpt"] == ["ab ", "ab", "c", " ab"]


def test_numbers_of_a_saved_page_are_rounded_and_its_size_is_limited() -> None:
    """A text of 1,024 tokens with random distributions in full precision."""
    rng = random.Random(1)

    def rows(count: int) -> list[Any]:
        return [{"top": [[k, rng.random() / 8] for k in range(6)], "entropy": rng.random()} for _ in range(count)]

    run = Run()
    drafted = {"pieces": ["b", "X"], "draft": ("b", "c", "d"), "accepted": (0,), "tested": 2}
    steps = [step(i, **drafted) for i in range(1, 512)]
    absorb(run, SPEC, header(), PREFILL, *(line | {"laws": rows(4), "drafted": rows(3)} for line in steps), end())
    run.finish()
    page = web_page(run)
    assert len(page.encode()) < 500_000
    data = json.loads(gzip.decompress(base64.b64decode(page.partition('id="run-data">')[2].partition("<")[0])))
    node, exact = (pictures[511]["nodes"][0] for pictures in (data["steps"][SPEC], step_pictures(run.lanes[SPEC])))
    assert len(exact["bars"]) > 4
    assert node["entropy_p"] != exact["entropy_p"] == pytest.approx(node["entropy_p"], rel=1e-5)
