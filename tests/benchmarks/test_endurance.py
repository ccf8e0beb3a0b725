"""Figures of the endurance test."""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.endurance import Sample, TimedVisit, of_page, resources, rows
from benchmarks.load import Visit


def run(start: float, first_token_s: float, tokens: list[int], phase: str = "done", gaps: int = 0) -> TimedVisit:
    seen = Visit(tokens, [("running", ""), (phase, "")], first_token_s, gaps, over=True)
    return TimedVisit(start, seen, [1, 2])


def test_lost_different_and_failed_runs_are_counted() -> None:
    unfinished = run(7.0, 0.5, [1])
    unfinished.run.over = False
    visits = [
        run(0.0, 0.1, [1, 2]),
        run(1.0, 0.2, [1, 3]),
        run(2.0, 0.3, [1], "failed"),
        run(3.0, 9.0, [1, 2]),
        unfinished,
    ]
    long = [run(2.5, 1.0, [1, 2], gaps=1)]
    figures = of_page(visits, long)
    assert [figures[name] for name in ("texts", "lost", "wrong", "failed")] == [6, 2, 1, 1]
    assert figures["delayed"].startswith("9.00 / 9.00 (1 prompts")  # only the run that began between 2.5 and 3.5


def test_the_slope_of_the_memory_is_that_of_the_second_half() -> None:
    first = [Sample(minute, 100 + 50 * minute, 8, 20, 3) for minute in range(10)]
    second = [Sample(minute, 600 + 0.5 * minute, 9, 21, 4) for minute in range(10, 20)]
    figures = resources([*first, *second])
    assert abs(figures["slope"] - 0.5) < 1e-9 and figures["minutes"] == 19
    assert figures["resources"] == "9 9, 21 21, 4 4"
    grown = [*first, *second[:-1], replace(second[-1], threads=30)]
    assert resources(grown)["resources"].startswith("9 30")


def test_only_services_are_killed() -> None:
    page, services = rows(argparse.Namespace(visitors=2, edges=3), {"texts": 5}, {"texts": 4, "killed": 30})
    assert page == {"name": "page, 2 visitors", "killed": "-", "texts": 5}
    assert services["killed"] == 30 and services["lost"] == services["delayed"] == "-"
