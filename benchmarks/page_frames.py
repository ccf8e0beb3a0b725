"""Frame times, latency and browser heap of the page: table `page_frames` in docs/page.md.

`python -m benchmarks.page_frames --write`. Two lanes of 2,048 tokens each run on the real page in a real browser; the
steps of a recorded trace replace the models, at a fixed speed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from playwright.sync_api import Page, expect

from benchmarks.pages import chromium, served
from benchmarks.runs import percentile
from benchmarks.tables import publish, run_study, study_parser
from specdemo.bench import Progress
from specdemo.core import trace
from specdemo.core.events import End, Event
from specdemo.core.metrics import Metrics
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS
from specdemo.recipe import Recipe

TABLES = {"page_frames": "docs/page.md"}
TRACE = sorted((ASSETS / "traces").glob("*.jsonl"))[0]
COLUMNS = {
    "": "{run}",
    "frames": "{frames:.0f}",
    "p50 ms": "{p50_ms:.1f}",
    "p95 ms": "{p95_ms:.1f}",
    "longest ms": "{longest_ms:.1f}",
    "latency p95 ms": "{latency_p95_ms:.1f}",
    "longest latency ms": "{longest_latency_ms:.1f}",
    "heap MB": "{heap_mb:.1f}",
    "spans": "{spans:.0f}",
}
WATCH = """() => {
    window.gaps = [];
    window.painted = {spec: [], ar: []}; // time at which each step was on the page, in ms since the epoch
    const old = document.querySelector(".lane .given"); // of the previous run, until the lanes are cleared
    let before = performance.now();
    const frame = (now) => {
        window.gaps.push(now - before);
        before = now;
        for (const lane of old?.isConnected ? [] : ["spec", "ar"]) {
            const times = window.painted[lane], steps = document.querySelectorAll(`#lane-${lane} .round`).length;
            while (times.length < steps) times.push(performance.timeOrigin + performance.now());
        }
        if (!window.finished) requestAnimationFrame(frame);
    };
    window.finished = false;
    requestAnimationFrame(frame);
}"""


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


def measure(page: Page, devtools: Any, player: TracePlayer) -> dict[str, Any]:
    """Run both lanes once and return the figures."""
    page.evaluate(WATCH)
    page.locator("#run").click()
    page.wait_for_function("document.getElementById('status').textContent.startsWith('done')", polling=500)
    page.evaluate("window.finished = true")
    gaps, painted = page.evaluate("[window.gaps, window.painted]")
    latencies = [
        shown - 1000 * sent
        for lane, times in player.sent.items()
        for shown, sent in zip(painted[lane], times, strict=True)
    ]
    devtools.send("HeapProfiler.collectGarbage")
    return {
        "frames": len(gaps),
        "p50_ms": percentile(gaps, 0.5),
        "p95_ms": percentile(gaps, 0.95),
        "longest_ms": max(gaps),
        "latency_p95_ms": percentile(latencies, 0.95),
        "longest_latency_ms": max(latencies),
        "heap_mb": devtools.send("Runtime.getHeapUsage")["usedSize"] / 1e6,
        "spans": page.locator(".lane .tok").count(),
    }


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return first run, last run and the largest value of each figure, to show growth and outliers."""
    largest = {name: max(figures[name] for figures in runs) for name in runs[0]}
    rows = {"first run": runs[0], "last run": runs[-1], f"largest of {len(runs)} runs": largest}
    return [{"run": name, **figures} for name, figures in rows.items()]


def study(options: argparse.Namespace) -> None:
    """Measure several runs in a tab and publish the table."""
    player, records, progress = TracePlayer(options.tokens, options.rate), [], Progress()
    with served(ModelPool(), engine=player) as demo, chromium() as opened:
        page = opened.new_page(viewport={"width": 1280, "height": 900})
        devtools = page.context.new_cdp_session(page)
        page.set_default_timeout(600_000)
        page.goto(demo.url)
        expect(page.locator("#lane-spec")).to_be_visible()
        page.locator("#compare input").check()
        page.locator("#prompt textarea").fill("x")
        for i in range(1, options.runs + 1):
            records.append(measure(page, devtools, player))
            progress.show(f"{i} of {options.runs} runs")
    progress.over()
    publish(options, "page_frames", COLUMNS, summary(records))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per lane (default: 2048)")
    parser.add_argument("--rate", type=float, default=200.0, help="tokens per second of each lane (default: 200)")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
