"""What the page costs over the terminal, and how long a cold start takes: the real page in a real browser.

A script, not a test: `.venv/bin/python tests/measure_page.py --help`. It wants the machine to itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import browser
import torch
from pagekit import ARGS, CODE, run, saved, status
from playwright.sync_api import Browser, Page, expect, sync_playwright

from app import choose_port
from specdemo.bench.table import interval
from specdemo.generate import generate
from specdemo.models.shelf import Shelf
from specdemo.recipe import Recipe
from specdemo.ui.page import build, launch_options

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
PATIENCE = 600.0  # seconds; only says when a wait counts as a failure
POLL = 0.02  # seconds
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

Trace = list[dict[str, Any]]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, running."""
    path = browser.executable() or sys.exit(browser.MISSING)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=ARGS) as opened:
        yield opened


@contextmanager
def tab(opened: Browser) -> Iterator[Page]:
    """An empty tab of a visitor who was never here: nothing is cached."""
    with opened.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(PATIENCE * 1000)
        yield context.new_page()


@contextmanager
def served(shelf: Shelf) -> Iterator[Any]:
    """The page, served from this process."""
    demo = build(shelf)
    _, demo.url, _ = demo.launch(server_name=HOST, prevent_thread_lock=True, **launch_options())
    try:
        yield demo
    finally:
        demo.worker.close()
        demo.close(verbose=False)


def fill(page: Page, name: str, value: float) -> None:
    """Type a number into the sidebar."""
    box = page.locator(f"#{name} input[type=number]")
    box.fill(f"{value:g}")
    box.blur()


def in_terminal(demo: Any, shelf: Shelf, recipe: Recipe) -> Trace:
    """A run as the terminal does it, in the thread that owns the models, as one job without turns."""
    stream = demo.worker.submit(lambda: iter([list(generate(recipe, CODE, shelf))]))
    stream.wait()
    if stream.error:
        raise stream.error
    return [line for line in stream.items[0] if "phase" not in line]


def on_page(page: Page) -> Trace:
    """A run as a visitor does it, and the trace that they save."""
    run(page, CODE)
    status(page, "done")
    return saved(page)


def text(trace: Trace) -> list[int]:
    """The tokens of a run."""
    return [token for line in trace if "i" in line for token in line["tokens"]]


def speed(trace: Trace) -> float:
    """Tokens per second on the wall, after those of the first pass."""
    steps = [line for line in trace if "i" in line]
    return sum(len(step["tokens"]) for step in steps[1:]) / (steps[-1]["t"] - steps[0]["t"])


def page_cost(rounds: int, tokens: int) -> None:
    """Decode the same text in both ways, in turn, and print what each took."""
    recipe = Recipe(pair="bundled", method="draft", gamma=3, temperature=0.0, top_p=1.0, max_tokens=tokens)
    shelf = Shelf()
    with served(shelf) as demo, chromium() as opened, tab(opened) as page:
        page.goto(demo.url)
        expect(page.locator("#lane-spec")).to_be_visible()
        for name in ("gamma", "temperature", "top_p", "max_tokens"):
            fill(page, name.replace("_", "-"), getattr(recipe, name))
        ways = {"terminal": lambda: in_terminal(demo, shelf, recipe), "page": lambda: on_page(page)}
        first = {way: decode() for way, decode in ways.items()}
        if first["page"][0]["recipe"] != json.loads(json.dumps(asdict(recipe))):
            sys.exit(f"The page ran another recipe: {first['page'][0]['recipe']}")
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for i in range(rounds):
            for way in sorted(ways, reverse=bool(i % 2)):  # each goes first in turn
                trace = ways[way]()
                if text(trace) != text(first["terminal"]):
                    sys.exit(f"The {way} wrote another text: the speeds cannot be compared.")
                speeds[way].append(speed(trace))
    ratios = [ours / theirs for ours, theirs in zip(speeds["page"], speeds["terminal"], strict=True)]
    low, high = interval(ratios)
    middle = [statistics.median(column) for column in (speeds["terminal"], speeds["page"], ratios)]
    rows = [
        [str(i), f"{theirs:.1f}", f"{ours:.1f}", f"{ratio:.3f}"]
        for i, (theirs, ours, ratio) in enumerate(zip(speeds["terminal"], speeds["page"], ratios, strict=True), 1)
    ]
    rows.append(["median", f"{middle[0]:.1f}", f"{middle[1]:.1f}", f"{middle[2]:.3f} [{low:.3f}, {high:.3f}]"])
    device = first["page"][0]["environment"]["device"]
    print(f"\nDecoding {len(text(first['page']))} tokens on {device}, {torch.get_num_threads()} threads\n")
    show(("round", "terminal, tokens/s", "page, tokens/s", "page / terminal"), rows)


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
            fill(page, "max-tokens", FEW)
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
    parser.add_argument("--skip-cold", action="store_true", help="leave the cold starts out")
    options = parser.parse_args()
    if options.rounds < 1 or not 8 <= options.tokens <= 1024:
        parser.error("--rounds must be at least 1 and --tokens from 8 to 1024")
    expect.set_options(timeout=PATIENCE * 1000)
    page_cost(options.rounds, options.tokens)
    if not options.skip_cold:
        cold_starts()


if __name__ == "__main__":
    main()
