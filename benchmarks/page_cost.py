"""What the page costs over the terminal, and how long a cold start takes: the real page in a real browser.

Usage: `.venv/bin/python benchmarks/page_cost.py --help`. It wants the machine to itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil
import torch
from e2e import browser
from e2e.page_fixtures import ARGS, CODE, run, set_number, status
from playwright.sync_api import Browser, Page, expect, sync_playwright
from websockets.sync.client import connect

from app import choose_port
from specdemo.core.events import Event, Loading, StepEvent
from specdemo.core.intervals import interval
from specdemo.core.step import Step
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.ui.page import build, launch_options
from specdemo.ui.service import leave_a_core

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
PATIENCE = 600.0  # seconds; only says when a wait counts as a failure
POLL = 0.02  # seconds
SAME = "terminal, threads of the page"
STARTS, FEW = 3, 16  # cold starts, and the tokens of their runs
COLD = (
    "process start to page answers",
    "process start to page drawn",
    "process start to first token",
    "Run to first token, first run",
    "Run to first token, once loaded",
)
# Timed in the browser, from the click itself. The last run's tokens stay until the first frame of the next one.
WATCH = """() => {
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

Trace = list[Event]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, running."""
    path = browser.executable(browser.WHOLE) or sys.exit(browser.MISSING)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=ARGS) as opened:
        yield opened


@contextmanager
def tab(opened: Browser) -> Iterator[Page]:
    """An empty tab of a visitor who was never here: nothing is cached."""
    with opened.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(PATIENCE * 1000)
        yield context.new_page()


@contextmanager
def served(pool: ModelPool, engine: Kept) -> Iterator[Any]:
    """The page, served from this process."""
    demo = build(pool, engine=engine)
    _, demo.url, _ = demo.launch(server_name=HOST, prevent_thread_lock=True, **launch_options(demo))
    gc.freeze()  # as the program does
    try:
        yield demo
    finally:
        demo.worker.close()
        demo.close(verbose=False)


class Kept:
    """`generate`, and the trace of its latest run."""

    def __init__(self) -> None:
        self.trace: Trace = []

    def __call__(self, *given: Any) -> Iterator[Event]:
        self.trace = []
        for event in generate(*given):
            if not isinstance(event, Loading):
                self.trace.append(event)
            yield event


@contextmanager
def halted(browser_process: psutil.Process) -> Iterator[None]:
    """Within, the browser is as good as closed."""
    family = [browser_process, *browser_process.children(recursive=True)]
    for one in family:
        one.suspend()
    try:
        yield
    finally:
        for one in family:
            one.resume()


def in_terminal(demo: Any, engine: Kept, pool: ModelPool, recipe: Recipe, threads: int) -> None:
    """A run as the terminal does it: on all its threads, in the one that owns the models, without turns."""

    def job() -> Iterator[int]:
        usual = torch.get_num_threads()
        torch.set_num_threads(threads)  # of the thread that calls, too
        try:
            yield sum(1 for _ in engine(recipe, CODE, pool))
        finally:
            torch.set_num_threads(usual)

    stream = demo.worker.submit(job)
    stream.wait()
    if stream.error:
        raise stream.error


def on_page(page: Page) -> None:
    """A run as a visitor does it."""
    run(page, CODE)
    status(page, "done")


def read_along(url: str, asked: str) -> None:
    """A visitor who draws nothing: press Run, read the stream to its end. In a process of its own, the least urgent."""
    os.nice(19)
    with urlopen(f"{url}config") as answer:
        config = json.load(answer)
    props = {part["id"]: part["props"] for part in config["components"]}
    run_button = next(one for one, about in props.items() if about.get("elem_id") == "run")
    pressed = next(event for event in config["dependencies"] if [run_button, "click"] in event["targets"])
    drawn = next(event for event in config["dependencies"] if event["inputs"] == pressed["outputs"])
    wanted = json.loads(asked)
    values = [wanted.get(props[one].get("elem_id"), props[one].get("value")) for one in pressed["inputs"]]
    body = {"data": [json.dumps(values)], "fn_index": drawn["id"], "session_hash": f"reader{os.getpid()}"}
    head = {"Content-Type": "application/json"}
    urlopen(Request(f"{url}gradio_api/queue/join", json.dumps(body).encode(), head)).read()
    with urlopen(f"{url}gradio_api/queue/data?session_hash={body['session_hash']}") as stream:
        first = next(line for line in stream if b'"process_generating"' in line)
        frame = json.loads(json.loads(first[len(b"data: ") :])["output"]["data"][0])
        with connect(f"{url}frames/{frame['run']}".replace("http", "ws", 1)) as frames:
            for _ in frames:
                pass
        for line in stream:
            if b'"close_stream"' in line:
                return


def plain(value: Any) -> Any:
    """As a trace file would hold it."""
    return json.loads(json.dumps(value))


def steps_of(trace: Trace) -> list[Step]:
    return [event.step for event in trace if isinstance(event, StepEvent)]


def text(trace: Trace) -> list[int]:
    """The tokens of a run."""
    return [token for step in steps_of(trace) for token in step.tokens]


def speed(trace: Trace) -> float:
    """Tokens per second on the wall, after those of the first pass."""
    steps = steps_of(trace)
    return sum(len(step.tokens) for step in steps[1:]) / (steps[-1].t - steps[0].t)


def used() -> dict[str, float]:
    """CPU seconds so far: of this process by thread, of the browser by kind of process."""
    seconds: dict[str, float] = {}
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for thread in psutil.Process().threads():
        name = names.get(thread.id, "torch and others")
        name = {"device": "worker", "Thread-1 (run)": "server"}.get(name, "torch and others")
        seconds[name] = seconds.get(name, 0) + thread.user_time + thread.system_time
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            line = process.cmdline()
            if line and "chrom" in line[0]:
                kind = next((word[7:] for word in line if word.startswith("--type=")), "browser")
                spent = process.cpu_times()
                seconds[f"chromium {kind}"] = seconds.get(f"chromium {kind}", 0) + spent.user + spent.system
    return seconds


def page_cost(rounds: int, tokens: int, like_root: bool, elsewhere: bool) -> None:
    """Decode the same text in a terminal's loop, for a reader and on the page, in turn; print what each took."""
    recipe = Recipe(pair="bundled", method="draft", gamma=3, temperature=0.0, top_p=1.0, max_tokens=tokens, top=5)
    pool, engine, threads = ModelPool(), Kept(), torch.get_num_threads()
    if not elsewhere:
        leave_a_core()  # as the program does where the browser is on its machine
    page_threads = torch.get_num_threads()
    with served(pool, engine) as demo, chromium() as opened, tab(opened) as page:
        page.goto(demo.url)
        expect(page.locator("#lane-spec")).to_be_visible()
        asked = {
            name.replace("_", "-"): getattr(recipe, name) for name in ("gamma", "temperature", "top_p", "max_tokens")
        }
        for name, value in asked.items():
            set_number(page, name, value)
        asked["prompt"] = CODE
        family = psutil.Process().children(recursive=True)
        shown = next(one for one in family if "chrom" in one.name() and "--type" not in " ".join(one.cmdline()))
        if not like_root:  # only root's browser may put itself before everybody else
            for one in [shown, *shown.children(recursive=True)]:
                for thread in one.threads():
                    os.setpriority(os.PRIO_PROCESS, thread.id, 0)

        def terminal() -> None:
            with halted(shown):
                in_terminal(demo, engine, pool, recipe, threads)

        def same_threads() -> None:
            with halted(shown):
                in_terminal(demo, engine, pool, recipe, page_threads)

        def reader() -> None:
            with halted(shown):
                subprocess.run([sys.executable, __file__, "--read", demo.url, json.dumps(asked)], check=True)

        ways = {"terminal": terminal, SAME: same_threads, "reader": reader, "page": lambda: on_page(page)}
        if page_threads == threads:
            del ways["terminal"]
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        spent: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        first = None
        for i in range(-1, rounds):
            order = list(ways) if i % 2 else list(ways)[::-1]  # each goes first in turn
            for way in order:
                before = used()
                ways[way]()
                after, trace = used(), engine.trace
                if plain(trace[0].recipe) != plain(asdict(recipe)):
                    sys.exit(f"The {way} ran another recipe: {trace[0].recipe}")
                first = first or text(trace)
                if text(trace) != first:
                    sys.exit(f"The {way} wrote another text: the speeds cannot be compared.")
                if i >= 0:  # the first round only warms up
                    speeds[way].append(speed(trace))
                    took = steps_of(trace)[-1].t
                    spent[way].append({name: (after[name] - before.get(name, 0)) / took for name in after})
    device = trace[0].environment["device"]
    print(f"\n{tokens} tokens on {device}; threads: {threads} in the terminal, {page_threads} on the page\n")
    rows = []
    for way, column in speeds.items():
        ratios = [ours / theirs for ours, theirs in zip(column, speeds[SAME], strict=True)]
        low, high = interval(ratios)
        rows.append(
            [way, f"{statistics.median(column):.1f}", f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"]
        )
    show(("way", "tokens/s", "of the terminal's on as many threads"), rows)
    print("\nCPU, milliseconds per second of the run\n")
    names = sorted({name for runs in spent.values() for one in runs for name in one})
    middle = {
        way: {name: 1000 * statistics.median(one.get(name, 0) for one in runs) for name in names}
        for way, runs in spent.items()
    }
    rows = [[name, *(f"{column[name]:.0f}" for column in middle.values())] for name in names]
    show(("", *middle), [row for row in rows if any(cell != "0" for cell in row[1:])])


def answers(port: int) -> bool:
    """Whether the page is served."""
    door = HTTPConnection(HOST, port, timeout=PATIENCE)  # knows no proxy
    try:
        door.request("GET", "/")
        return door.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        door.close()


def first_token(page: Page) -> float:
    """Press Run; seconds to the first token."""
    page.evaluate(WATCH)
    page.locator("#run").click()
    return page.wait_for_function("window.waited").json_value()


def cold_start(opened: Browser) -> list[float]:
    """Seconds of one start of the program, in the order of `COLD`."""
    port = choose_port(HOST, None)
    command = [sys.executable, "app.py", "--host", HOST, "--port", str(port), "--no-browser"]
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while not answers(port):
            if process.poll() is not None or time.perf_counter() - began > PATIENCE:
                sys.exit("The program did not start.")
            time.sleep(POLL)
        marks = [time.perf_counter() - began]
        with tab(opened) as page:
            page.goto(f"http://{HOST}:{port}", wait_until="commit")
            page.locator("#run").wait_for()
            marks.append(time.perf_counter() - began)
            expect(page.locator("#lane-spec")).to_be_visible()
            set_number(page, "max-tokens", FEW)
            page.locator("#prompt textarea").fill(CODE)
            pressed = first_token(page)
            marks += [time.perf_counter() - began, pressed]
            status(page, "done")
            marks.append(first_token(page))
            status(page, "done")
        return marks
    finally:
        process.terminate()
        process.wait()


def cold_starts() -> None:
    """Start the program a few times and print how long a visitor waits."""
    with chromium() as opened:
        with tab(opened) as page:  # the browser itself is not cold
            page.goto("about:blank")
        starts = [cold_start(opened) for _ in range(STARTS)]
    rows = [
        [name, *(f"{seconds:.2f}" for seconds in column), f"{statistics.median(column):.2f}"]
        for name, column in zip(COLD, zip(*starts, strict=True), strict=True)
    ]
    print("\nCold start: a new process, the browser running, the files in the system's cache\n")
    show(("seconds from", *map(str, range(1, STARTS + 1)), "median"), rows)


def show(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="pairs of runs (default: 8)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per run (default: 256)")
    parser.add_argument("--root", action="store_true", help="leave root's browser the priority that it takes itself")
    parser.add_argument("--elsewhere", action="store_true", help="all threads, as where visitors are elsewhere")
    parser.add_argument("--read", nargs=2, metavar=("URL", "SETTINGS"), help=argparse.SUPPRESS)
    parser.add_argument("--skip-cold", action="store_true", help="leave the cold starts out")
    options = parser.parse_args()
    if options.rounds < 1 or not 8 <= options.tokens <= 1024:
        parser.error("--rounds must be at least 1 and --tokens from 8 to 1024")
    expect.set_options(timeout=PATIENCE * 1000)
    if options.read:
        return read_along(*options.read)
    page_cost(options.rounds, options.tokens, options.root, options.elsewhere)
    if not options.skip_cold:
        cold_starts()


if __name__ == "__main__":
    main()
