"""Frame rate and latency of the page in a real browser: table `page_frames` in docs/page.md.

`python -m benchmarks.page_cost frames --write`; requires an otherwise idle machine. Two lanes of 2,048 tokens each run
on the page; the steps of a recorded trace replace the models, at a fixed speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from playwright.sync_api import Page, expect

from benchmarks.pages import RETURNING, TracePlayer, chromium, launched
from benchmarks.tables import Study, publish, study_command
from specdemo.cli.output import PROGRESS_S, StatusLine
from specdemo.core.metrics import percentile

TABLES = {"page_frames": "docs/page.md"}
FRAME_COLUMNS = {
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
WATCH_FRAMES = """() => {
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


def frame_times(page: Page, devtools: Any, player: TracePlayer) -> dict[str, Any]:
    """Run both lanes once and return the figures."""
    page.evaluate(WATCH_FRAMES)
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


def frames(options: argparse.Namespace) -> None:
    """Measure frame times, latency and browser heap of several runs in a tab."""
    player, records, progress = TracePlayer(options.tokens, options.rate), [], StatusLine(PROGRESS_S)
    with launched(None, engine=player, compare=False) as demo, chromium() as opened:
        page = opened.new_page(viewport={"width": 1280, "height": 900})
        page.add_init_script(RETURNING)
        devtools = page.context.new_cdp_session(page)
        page.set_default_timeout(600_000)
        page.goto(demo.url)
        expect(page.locator("#lane-spec")).to_be_visible()
        page.locator("#compare input").check()
        page.locator("#prompt textarea").fill("x")
        for i in range(1, options.runs + 1):
            records.append(frame_times(page, devtools, player))
            progress.show(f"{i} of {options.runs} runs")
    progress.clear()
    publish(options, "page_frames", FRAME_COLUMNS, summary(records))


OPTIONS = {"runs": 10, "tokens": 2048, "rate": 200.0}  # tokens of a lane, per second
main = study_command(__file__, __doc__, TABLES, {"frames": Study(frames, OPTIONS)})

if __name__ == "__main__":
    sys.exit(main())
