"""The real page in a real browser, for studies that measure or record it."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from benchmarks.tables import ROOT
from specdemo.core import trace
from specdemo.core.events import End, Event
from specdemo.core.metrics import Metrics
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS
from specdemo.recipe import Recipe

sys.path.insert(0, str(ROOT / "tests"))

from e2e import browser
from e2e.page_fixtures import ARGS, CODE, RETURNING, configure, launched, run, set_number, status

__all__ = ["CODE", "RETURNING", "configure", "launched", "run", "set_number", "status"]  # imported from here

TRACE = sorted((ASSETS / "traces").glob("*.jsonl"))[0]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a complete Chromium, not the headless shell."""
    path = browser.executable(browser.WHOLE) or sys.exit(browser.MISSING)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=ARGS) as opened:
        yield opened


class TracePlayer:
    """Engine that repeats the steps of a recorded trace at a fixed number of tokens per second."""

    def __init__(self, tokens: int, rate: float) -> None:
        self._lanes = dict(zip(("spec", "ar"), trace.read(TRACE.read_text("utf-8")), strict=True))
        self._tokens, self._rate = tokens, rate
        self.sent: dict[str, list[float]] = {}  # time of each step by lane, in seconds since the epoch

    def __call__(self, recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[Event]:
        lane = "ar" if recipe.method == "ar" else "spec"
        metrics, (first, *steps) = Metrics(), self._lanes[lane].steps
        sent = self.sent[lane] = []
        began, count = time.perf_counter(), 0
        yield self._lanes[lane].header
        for i, event in enumerate(itertools.chain([first], itertools.cycle(steps))):
            count += len(event.step.tokens)
            time.sleep(max(0.0, began + count / self._rate - time.perf_counter()))
            sent.append(time.time())
            step = replace(event.step, i=i, t=time.perf_counter() - began)
            metrics = metrics.plus(step)
            yield replace(event, step=step, metrics=metrics)
            if count >= self._tokens:
                break
        yield End("length", None, metrics)
