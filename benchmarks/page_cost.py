"""Cost of the page in a real browser: tables `page_cost*` and `page_frames` in docs/page.md.

`python -m benchmarks.page_cost STUDY --write`; requires an otherwise idle machine.

`speed` compares the page with the terminal (`page_cost`, `page_cost-cpu`; with `--remote` `page_cost-remote`); `starts`
measures cold starts. For `frames`, two lanes of 2,048 tokens each run on the page; the steps of a recorded trace
replace the models, at a fixed speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from urllib.request import urlopen

import psutil
import torch
from playwright.sync_api import Browser, Page, expect, sync_playwright

from benchmarks.load import frames_of_run, page_process
from benchmarks.runs import in_new_process
from benchmarks.tables import ROOT, Study, positive, publish, study_command
from specdemo.cli.run import PROGRESS_S, StatusLine
from specdemo.core import trace
from specdemo.core.errors import UserError
from specdemo.core.events import End, Event, Header, StepEvent
from specdemo.core.metrics import Metrics, interval, percentile
from specdemo.core.step import Step
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS
from specdemo.recipe import Recipe
from specdemo.ui.service import leave_a_core

sys.path.insert(0, str(ROOT / "tests"))

from e2e import browser
from e2e.page_fixtures import ARGS, CODE, RETURNING, configure, launched, run, set_number, status

TABLE_NAMES = ("page_cost", "page_cost-remote", "page_cost-cpu", "page_cost-startup", "page_frames")
TABLES = dict.fromkeys(TABLE_NAMES, "docs/page.md")
TIMEOUT_S = 120.0
BASELINE = "terminal, threads of the page"
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


class RecordingEngine:
    """`generate`, recording the trace of its latest run."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.steps: list[Step] = []

    def __call__(self, *arguments: Any) -> Iterator[Event]:
        self.steps = []
        for event in generate(*arguments):
            if isinstance(event, Header):
                self.header = event
            elif isinstance(event, StepEvent):
                self.steps.append(event.step)
            yield event

    @property
    def speed(self) -> float:
        """Tokens per second of wall time after the prefill."""
        steps = self.steps
        return sum(len(step.tokens) for step in steps[1:]) / (steps[-1].t - steps[0].t)


@contextmanager
def tab(opened: Browser) -> Iterator[Page]:
    """Open an empty tab without cached files."""
    with opened.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(TIMEOUT_S * 1000)
        context.add_init_script(RETURNING)
        yield context.new_page()


@contextmanager
def suspended(browser_process: psutil.Process) -> Iterator[None]:
    family = [browser_process, *browser_process.children(recursive=True)]
    for process in family:
        process.suspend()
    try:
        yield
    finally:
        for process in family:
            process.resume()


def run_in_terminal(demo: Any, engine: RecordingEngine, pool: ModelPool, recipe: Recipe, threads: int) -> None:
    """Run like the terminal: in the device thread, with `threads` torch threads and without yielding to other jobs."""

    def job() -> Iterator[int]:
        usual = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield sum(1 for _ in engine(recipe, CODE, pool))
        finally:
            torch.set_num_threads(usual)

    stream = demo.worker.submit(job)
    stream.wait()
    if stream.error:
        raise stream.error


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process by thread and of the browser by type of process."""
    seconds: dict[str, float] = {}
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    groups = {"device": "worker", "Thread-1 (run)": "server"}
    for thread in psutil.Process().threads():
        group = groups.get(names.get(thread.id, ""), "torch and others")
        seconds[group] = seconds.get(group, 0) + thread.user_time + thread.system_time
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            command = process.cmdline()
            if command and "chrom" in command[0]:
                kind = next((word[7:] for word in command if word.startswith("--type=")), "browser")
                times = process.cpu_times()
                seconds[f"chromium {kind}"] = seconds.get(f"chromium {kind}", 0) + times.user + times.system
    return seconds


Speeds = dict[str, list[float]]
CpuShares = dict[str, list[dict[str, float]]]  # CPU seconds per second of each run


def alternate(
    ways: Mapping[str, Callable[[], None]], rounds: int, engine: RecordingEngine, recipe: Recipe
) -> tuple[Speeds, CpuShares]:
    """Run all ways in alternating order, after a warm-up round. Raises `UserError` if recipes or texts differ."""
    speeds: Speeds = {way: [] for way in ways}
    cpu: CpuShares = {way: [] for way in ways}
    expected_recipe, first_text = json.loads(json.dumps(asdict(recipe))), None
    for i in range(-1, rounds):
        for way in list(ways) if i % 2 else list(ways)[::-1]:
            before = cpu_seconds()
            ways[way]()
            after, steps = cpu_seconds(), engine.steps
            text = [step.tokens for step in steps]
            first_text = first_text or text
            if json.loads(json.dumps(engine.header.recipe)) != expected_recipe or text != first_text:
                raise UserError(f"{way}: the recipe or the text differs, which makes the speeds incomparable")
            if i >= 0:
                speeds[way].append(engine.speed)
                cpu[way].append({name: (after[name] - before.get(name, 0)) / steps[-1].t for name in after})
    return speeds, cpu


def read_frames(url: str, settings: Mapping[str, Any]) -> None:
    """Press Run and read the stream without rendering; runs in a process of the lowest priority."""
    os.nice(19)
    for _ in frames_of_run(url, f"reader{os.getpid()}", settings):
        pass


def speed(options: argparse.Namespace) -> None:
    """Decode the same text in the terminal, for a reader and on the page; publish speeds and CPU times."""
    if not 8 <= options.tokens <= 1024:
        raise UserError("--tokens must be from 8 to 1024")
    expect.set_options(timeout=TIMEOUT_S * 1000)
    tokens = options.tokens
    recipe = Recipe(pair="bundled", method="draft", gamma=3, temperature=0.0, top_p=1.0, max_tokens=tokens, top=5)
    pool, engine, threads = ModelPool(), RecordingEngine(), torch.get_num_threads()
    if not options.remote:
        leave_a_core()  # as app.py does for a local browser
    page_threads = torch.get_num_threads()
    with launched(pool=pool, engine=engine, compare=False) as demo, chromium() as opened, tab(opened) as page:
        page.goto(demo.url)
        expect(page.locator("#lane-spec")).to_be_visible()
        settings = {name: getattr(recipe, name) for name in ("gamma", "temperature", "top_p", "max_tokens")}
        configure(page, **settings)
        family = psutil.Process().children(recursive=True)
        shown = next(p for p in family if "chrom" in p.name() and "--type" not in " ".join(p.cmdline()))
        if not options.root:
            for process in [shown, *shown.children(recursive=True)]:
                for thread in process.threads():
                    os.setpriority(os.PRIO_PROCESS, thread.id, 0)

        def on_page() -> None:
            run(page, CODE)
            status(page, "done")

        terminal = partial(run_in_terminal, demo, engine, pool, recipe)
        without_browser = suspended(shown)  # a decorator
        ways = {
            **({"terminal": without_browser(partial(terminal, threads))} if threads != page_threads else {}),
            BASELINE: without_browser(partial(terminal, page_threads)),
            "reader": without_browser(partial(in_new_process, read_frames, demo.url, {**settings, "prompt": CODE})),
            "page": on_page,
        }
        speeds, cpu = alternate(ways, options.rounds, engine, recipe)
    device = engine.header.environment["device"]
    print(f"{tokens} tokens on {device}; threads: {threads} in the terminal, {page_threads} on the page")
    publish_speeds(options, "page_cost-remote" if options.remote else "page_cost", speeds)
    if not options.remote:
        publish_cpu(options, "page_cost-cpu", cpu)


def publish_speeds(options: argparse.Namespace, name: str, speeds: Speeds) -> None:
    """Publish the median speed of each way and its ratio to the terminal with the same number of threads."""
    records = []
    for way, column in speeds.items():
        ratios = [speed / base for speed, base in zip(column, speeds[BASELINE], strict=True)]
        figures = {"speed": statistics.median(column), "ratio": statistics.median(ratios), "interval": interval(ratios)}
        records.append({"way": way, **figures})
    ratio = "{ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
    publish(options, name, {"": "{way}", "tokens/s": "{speed:.1f}", "relative to the terminal": ratio}, records)


def publish_cpu(options: argparse.Namespace, name: str, cpu: CpuShares) -> None:
    """Publish the median CPU milliseconds per second of the run, by thread or process and way."""
    groups = sorted({group for runs in cpu.values() for shares in runs for group in shares})
    records = []
    for group in groups:
        medians = [1000 * statistics.median(shares.get(group, 0) for shares in runs) for runs in cpu.values()]
        if max(medians) >= 0.5:
            records.append({"group": group, "ms": medians})
    columns = {"CPU, ms per second": "{group}", **{way: f"{{ms[{i}]:.0f}}" for i, way in enumerate(cpu)}}
    publish(options, name, columns, records)


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
    "speed": Study(
        speed,
        {
            "rounds": {"type": positive, "default": 8, "help": "pairs of runs (default: 8)"},
            "tokens": {"type": int, "default": 256, "help": "tokens per run (default: 256)"},
            "root": {"action": "store_true", "help": "keep the raised priority of a browser run by root"},
            "remote": {"action": "store_true", "help": "use all threads, as for remote visitors"},
        },
    ),
    "starts": Study(starts),
    "frames": Study(frames, {"runs": 10, "tokens": 2048, "rate": 200.0}),  # tokens of a lane, per second
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
