"""How smoothly the page draws, how far it is behind the worker, and whether the browser's heap stays flat.

Usage: `.venv/bin/python benchmarks/page_frames.py --help`. Two lanes of 2,048 tokens each run on the real
page in a real browser; the model is replaced by rounds of a recorded trace, at a pace that does not depend on it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e import browser
from e2e.page_fixtures import ARGS
from playwright.sync_api import expect, sync_playwright

from specdemo.core import trace
from specdemo.core.events import End, Event
from specdemo.core.metrics import Metrics
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS
from specdemo.recipe import Recipe
from specdemo.ui.page import build, launch_options

TRACE = sorted((ASSETS / "traces").glob("*.jsonl"))[0]
WATCH = """() => {
    window.gaps = [];
    window.painted = {spec: [], ar: []}; // when each round was on the page, in ms since the epoch
    const old = document.querySelector(".lane .given"); // of the run before, until the next one clears the lanes
    let before = performance.now();
    const look = (now) => {
        window.gaps.push(now - before);
        before = now;
        for (const lane of old?.isConnected ? [] : ["spec", "ar"]) {
            const seen = window.painted[lane], rounds = document.querySelectorAll(`#lane-${lane} .round`).length;
            while (seen.length < rounds) seen.push(performance.timeOrigin + performance.now());
        }
        if (!window.enough) requestAnimationFrame(look);
    };
    window.enough = false;
    requestAnimationFrame(look);
}"""


class Player:
    """An engine that plays rounds of a recorded trace, over and over, so many tokens per second."""

    def __init__(self, tokens: int, rate: float) -> None:
        speculative, baseline = trace.read(TRACE.read_text("utf-8"))
        self._lanes = {False: speculative, True: baseline}
        self._tokens, self._rate = tokens, rate
        self.given: dict[str, list[float]] = {}

    def __call__(self, recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[Event]:
        plain = recipe.method == "ar"
        lane, metrics = self._lanes[plain], Metrics()
        first, *rounds = lane.steps
        given = self.given["ar" if plain else "spec"] = []
        began, count = time.perf_counter(), 0
        yield lane.header
        for i, event in enumerate(itertools.chain([first], itertools.cycle(rounds))):
            count += len(event.step.tokens)
            time.sleep(max(0.0, began + count / self._rate - time.perf_counter()))
            given.append(time.time())
            step = replace(event.step, i=i, t=time.perf_counter() - began)
            metrics = metrics.plus(step)
            yield replace(event, step=step, metrics=metrics)
            if count >= self._tokens:
                break
        yield End("length", None, metrics)


def quantile(values: list[float], share: float) -> float:
    """A quantile by rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Run, watch, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2048, help="of each lane (default: 2048)")
    parser.add_argument("--rate", type=float, default=200.0, help="tokens per second of each lane (default: 200)")
    options = parser.parse_args()
    player = Player(options.tokens, options.rate)
    demo = build(engine=player)
    _, url, _ = demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, **launch_options(demo))
    gc.freeze()  # as the program does
    path = browser.executable(browser.WHOLE) or sys.exit(browser.MISSING)
    print("| run | frames | p50 ms | p95 ms | longest ms | behind the worker: p95 ms | most ms | heap MB | spans |")
    print("|---|---|---|---|---|---|---|---|---|")
    try:
        with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=ARGS) as chromium:
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            devtools = page.context.new_cdp_session(page)
            page.set_default_timeout(600_000)
            page.goto(url)
            expect(page.locator("#lane-spec")).to_be_visible()
            page.locator("#compare input").check()
            page.locator("#prompt textarea").fill("x")
            for i in range(options.runs):
                page.evaluate(WATCH)
                page.locator("#run").click()
                page.wait_for_function("document.getElementById('status').textContent.startsWith('done')", polling=500)
                page.evaluate("window.enough = true")
                gaps, painted = page.evaluate("[window.gaps, window.painted]")
                late = [
                    shown - 1000 * given
                    for lane, times in player.given.items()
                    for shown, given in zip(painted[lane], times, strict=True)
                ]
                devtools.send("HeapProfiler.collectGarbage")
                heap = devtools.send("Runtime.getHeapUsage")["usedSize"] / 1e6
                spans = page.locator(".lane .tok").count()
                row = [i + 1, len(gaps), *(quantile(gaps, share) for share in (0.5, 0.95, 1)), quantile(late, 0.95)]
                cells = [*row, max(late), heap, spans]
                print(
                    f"| {' | '.join(f'{cell:.1f}' if isinstance(cell, float) else str(cell) for cell in cells)} |",
                    flush=True,
                )
    finally:
        demo.worker.close()
        demo.close(verbose=False)


if __name__ == "__main__":
    main()
