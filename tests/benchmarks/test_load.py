"""Load test: figures of known frames and streams."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from benchmarks import load
from benchmarks.load import Answer, Text, figures, jain_index, share_between, streamed, visit

pytestmark = pytest.mark.slow


def frame(at: int, phase: tuple[str, str], *records: dict[str, Any], over: bool = False) -> str:
    return json.dumps({"at": at, "phase": phase, "r": records, "over": over})


def cells(*tokens: int, rejected: int | None = None) -> dict[str, Any]:
    kinds = [["accepted", "x", token] for token in tokens]
    return {"l": "spec", "c": [*kinds, *([["rejected", "y", rejected]] if rejected is not None else [])]}


FRAMES = [
    frame(0, ("queued", "2 ahead")),
    frame(0, ("prefill", ""), {"l": "spec", "head": {}}),
    frame(1, ("decoding", ""), cells(1, 2, rejected=9)),
    frame(2, ("done", "3 tokens"), cells(3), over=True),
]


def test_a_visit_contains_tokens_and_its_problem() -> None:
    assert visit(FRAMES, count(0.0, 1.0)) == Answer([1, 2, 3], 2.0)
    assert visit([FRAMES[0], *FRAMES[2:]], count(0.0, 1.0)).problem == "lost"
    assert visit(FRAMES[:-1], count(0.0, 1.0)).problem == "lost"
    assert visit([frame(0, ("failed", "busy"), over=True)], count(0.0, 1.0)) == Answer([], None, "failed")


def test_a_stream_contains_tokens_and_the_time_of_the_first() -> None:
    lines = ['data: {"choices": []}', "", *(f'data: {{"choices": [{{"token_ids": {ids}}}]}}' for ids in ([1], [2, 3]))]
    assert streamed([*lines, "data: [DONE]"], count(1.0, 1.0)) == Answer([1, 2, 3], 1.0)
    assert streamed(["data: [DONE]"], count(1.0, 1.0)).problem == "failed"


def test_problems_and_different_texts_are_counted() -> None:
    answers = [
        Answer([1, 2], 1.0),
        Answer([1, 3], 3.0, gaps_s=(0.5,)),
        Answer([1], 2.0, "lost"),
        Answer([], None, "failed"),
    ]
    texts = [Text("edges", i % 2, answer, [1, 2], 2.0 * (i % 2 == 0)) for i, answer in enumerate(answers)]
    record = figures(texts, seconds=4.0)
    assert [record[name] for name in ("texts", "lost", "different", "failed", "switches")] == [4, 1, 1, 1, 1]
    assert (record["tokens_per_second"], record["fairness"], record["first_p95_s"]) == (1.0, 0.5, 3.0)


def test_shares_of_time_and_their_fairness() -> None:
    assert [share_between(*bounds, 10.0, 14.0) for bounds in ((0, 20), (12, 20), (11, 12), (20, 30))] == [
        1,
        0.5,
        0.25,
        0,
    ]
    assert jain_index([3, 3, 3]) == 1 and jain_index([6, 0, 0]) == pytest.approx(1 / 3) and jain_index([0, 0]) == 1


@pytest.mark.parametrize(("flags", "cause"), [([], "no clients"), (["--edges", "1", "--fault", "kill"], "services")])
def test_a_load_without_effect_is_refused(flags: list[str], cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load.main(flags) == 2
    assert cause in capsys.readouterr().err
