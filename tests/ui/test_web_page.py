"""Saved web page of a run, and origins of guesses in the inspector."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
from typing import Any

import pytest
from fakes.trace_records import PREFILL, absorb, end, header, step, whole

from specdemo.ui.frames import Run
from specdemo.ui.lane import SPEC, Lane
from specdemo.ui.run_store import RunStore
from specdemo.ui.step_views import step_picture, step_pictures
from specdemo.ui.web_page import web_page

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


@pytest.mark.parametrize(
    "origin",
    [
        {"source": "text", "position": 10**9, "matched": 10**9},
        {"source": "text", "position": 0, "matched": 5},
        {"source": "n-gram", "order": 10**9, "count": 1},
        {"source": "n-gram", "order": 1},
        {"source": "elsewhere"},
        {},
    ],
)
def test_contradictory_origins_highlight_nothing(origin: dict) -> None:
    found = step_picture(copied(FIRST, guess(origin)), 1)["source"]
    assert not found["context"] and all(place == (5, 6) for place in found["copied"])


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
