"""Cost of the page in a real browser: tables `page_cost-startup` and `page_frames` in docs/page.md.

`python -m benchmarks.page_cost STUDY --write`; requires an otherwise idle machine.

`starts` measures cold starts. For `frames`, two lanes of 2,048 tokens each run on the page; the steps of a recorded
trace replace the models, at a fixed speed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

from playwright.sync_api import Browser, Page, expect

from benchmarks.load import page_process
from benchmarks.pages import CODE, RETURNING, TracePlayer, chromium, launched, set_number, status
from benchmarks.tables import Study, publish, study_command
from specdemo.cli.output import PROGRESS_S, StatusLine
from specdemo.core.metrics import percentile

TABLES = dict.fromkeys(("page_cost-startup", "page_frames"), "docs/page.md")
TIMEOUT_S = 120.0
COLD_STARTS, COLD_TOKENS = 3, 16
COLD_MARKS = (
    "process start to HTTP response",
    "process start to complete page",
    "process start to first token",
    "Run to first token, first run",
    "Run to first token, models loaded",
)
# Measured in the browser from the click. Tokens of the previous run remain until the first frame of the next.
WATCH_FIRST_TOKEN = """() => {
    const lane = document.getElementById("lane-spec"), old = lane.querySelector(".tok");
    let began;
    window.waited = null;
    document.addEventListener("click", () => { began = performance.now(); }, {capture: true, once: true});
    const watch = new MutationObserver(() => {
        const first = lane.querySelector(".tok");
        if (!first || first === old) return;
        window.waited = (performance.now() - began) / 1000;
        watch.disconnect();
    });
    watch.observe(lane, {childList: true});
}"""
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


@contextmanager
def tab(opened: Browser) -> Iterator[Page]:
    """Open an empty tab without cached files."""
    with opened.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(TIMEOUT_S * 1000)
        context.add_init_script(RETURNING)
        yield context.new_page()


def first_token_s(page: Page) -> float:
    """Press Run and return the seconds to the first token."""
    page.evaluate(WATCH_FIRST_TOKEN)
    page.locator("#run").click()
    return page.wait_for_function("window.waited").json_value()


def cold_start(opened: Browser) -> list[float]:
    """Start the program and return the seconds of `COLD_MARKS`."""
    began = time.perf_counter()
    with page_process() as (url, _), tab(opened) as page:
        with urlopen(url, timeout=TIMEOUT_S):
            marks = [time.perf_counter() - began]
        page.goto(url, wait_until="commit")
        page.locator("#run").wait_for()
        marks.append(time.perf_counter() - began)
        expect(page.locator("#lane-spec")).to_be_visible()
        set_number(page, "max-tokens", COLD_TOKENS)
        page.locator("#prompt textarea").fill(CODE)
        waited = first_token_s(page)
        marks += [time.perf_counter() - began, waited]
        status(page, "done")
        marks.append(first_token_s(page))
        status(page, "done")
        return marks


def starts(options: argparse.Namespace) -> None:
    """Publish the times of several cold starts; browser and file system cache are warm."""
    expect.set_options(timeout=TIMEOUT_S * 1000)
    with chromium() as opened:
        with tab(opened) as page:
            page.goto("about:blank")
        marks = [cold_start(opened) for _ in range(COLD_STARTS)]
    records = [
        {"mark": mark, "seconds": seconds, "median": statistics.median(seconds)}
        for mark, seconds in zip(COLD_MARKS, zip(*marks, strict=True), strict=True)
    ]
    columns = {"seconds from": "{mark}", **{str(i + 1): f"{{seconds[{i}]:.2f}}" for i in range(COLD_STARTS)}}
    publish(options, "page_cost-startup", {**columns, "median": "{median:.2f}"}, records)


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
    with launched(None, engine=player, compare=False) as demo, chromium() as opened, tab(opened) as page:
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


STUDIES = {
    "starts": Study(starts),
    "frames": Study(frames, {"runs": 10, "tokens": 2048, "rate": 200.0}),  # tokens of a lane, per second
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
