"""Continuous batching: throughput and first token with and without shared passes (docs/hosting.md).

`python -m benchmarks.batching STUDY --write`. `clients`: edges, which draft by prompt lookup, and clients that stream
completions load two services of the chat model, with shared passes and without, in alternating windows from processes
on the same cores. `visitors`: visitors of the page, a lane each. Every greedy text is compared with local AR decoding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.load import (
    LINK,
    PROMPT_STEP,
    Visit,
    ar_texts,
    jain_index,
    page_process,
    seconds_since,
    stream_completion,
    visit,
)
from benchmarks.page_client import PageClient
from benchmarks.runs import cloud_service, possibly_failed
from benchmarks.tables import Study, publish, study_command
from specdemo.core.metrics import percentile
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

TABLES = dict.fromkeys(("batching", "visitors"), "docs/hosting.md")
MAX_TOKENS = 48
WARM_UP_S = 1.0
HISTOGRAM = (1, 2, 8, 16, 32, 65)  # bounds of the numbers of texts
MODES = {"off": "1", "on": "64"}  # most texts of a pass
CLIENT_COLUMNS = {
    "clients": "{clients} {load}",
    "tokens/s off": "{off[tokens_per_second]:.0f}",
    "on": "{on[tokens_per_second]:.0f}",
    "ratio [range]": "{ratio:.2f} [{range[0]:.2f}, {range[1]:.2f}]",
    "first token p50 / p95 s off": "{off[p50_s]:.2f} / {off[p95_s]:.2f}",
    "first token on": "{on[p50_s]:.2f} / {on[p95_s]:.2f}",
    "Jain index off / on": "{off[fairness]:.2f} / {on[fairness]:.2f}",
    "texts, different": "{texts}, {wrong}",
}
VISITOR_COLUMNS = {
    "batching": "{batching}",
    "runs": "{runs:,}",
    "lost, mixed, failed": "{lost}, {wrong}, {failed}",
    "first token p50 / p95 s": "{p50_s:.1f} / {p95_s:.1f}",
    "Jain index": "{fairness:.3f}",
    "passes with 1 / 2-7 / 8-15 / 16-31 / 32-64 texts": "{histogram}",
}


@dataclass(frozen=True)
class TimedText:
    """A text as its client received it, with clock times."""

    tokens: Sequence[int]
    prompt: int
    start: float
    first_s: float
    end: float
    client: int

    def tokens_between(self, start: float, end: float) -> float:
        """Return the number of tokens between two times, evenly distributed over the text."""
        share = min(self.end, end) - max(self.start, start)
        return len(self.tokens) * max(0.0, share) / (self.end - self.start)


Client = Callable[[Prompt], tuple[Sequence[int], float]]  # tokens, seconds to the first one


def load_with(client: Client, count: int, prompts: Sequence[Prompt], seconds: float) -> tuple[list[TimedText], float]:
    """Run `count` clients; return their texts and the tokens per second after a warm-up."""
    texts: list[TimedText] = []
    begin = time.monotonic() + WARM_UP_S
    end = begin + seconds

    def run(number: int) -> None:
        index = number
        while (start := time.monotonic()) < end:
            chosen = index % len(prompts)
            tokens, first_s = client(prompts[chosen])
            texts.append(TimedText(tokens, chosen, start, first_s, time.monotonic(), number))
            index += 7

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts, sum(text.tokens_between(begin, end) for text in texts) / seconds


@dataclass(frozen=True)
class Measured:
    """Figures of a load."""

    tokens_per_second: float
    p50_s: float
    p95_s: float
    fairness: float  # of the tokens per second of each client
    texts: int
    wrong: int

    @classmethod
    def of(cls, texts: Sequence[TimedText], tokens_per_second: float, expected: Sequence[Sequence[int]]) -> Measured:
        """Compare `texts` with the expected ones by prompt."""
        waits = [text.first_s for text in texts]
        wrong = sum([*text.tokens] != [*expected[text.prompt]] for text in texts)
        by_client: dict[int, list[TimedText]] = {}
        for text in texts:
            by_client.setdefault(text.client, []).append(text)
        rates = [
            sum(len(text.tokens) for text in own) / sum(text.end - text.start for text in own)
            for own in by_client.values()
        ]
        p50_s, p95_s = (percentile(waits, share) for share in (0.5, 0.95))
        return cls(tokens_per_second, p50_s, p95_s, jain_index(rates), len(texts), wrong)


def edge(url: str) -> Client:
    """Return an edge of the service."""
    recipe = Recipe(pair=CHAT_PAIR, method="lookup", temperature=0.0, max_tokens=MAX_TOKENS)
    recipe, pool = replace(recipe, cloud=CloudConfig(url, **LINK)), ModelPool()

    def decode(prompt: Prompt) -> tuple[Sequence[int], float]:
        trace = possibly_failed(recipe, prompt.text, pool)
        return trace.tokens, trace.steps[0].step.t if trace.steps else 0.0

    return decode


def completions(url: str) -> Client:
    """Return a client of the endpoint."""

    def decode(prompt: Prompt) -> tuple[Sequence[int], float]:
        text = stream_completion(url, prompt, MAX_TOKENS)
        return text.tokens, text.first_s

    return decode


LOADS = {
    "edges, lookup": (edge, ()),
    "completions, AR": (completions, ("--method", "ar")),
    "completions, n-grams": (completions, ("--method", "nasd")),
}


def clients(options: argparse.Namespace) -> None:
    """Load a service with edges and with clients of its endpoint."""
    prompts = load_prompts()[::PROMPT_STEP]
    expected = ar_texts(Recipe(pair=CHAT_PAIR, method="ar", temperature=0.0, max_tokens=MAX_TOKENS), prompts)
    rows = []
    for load, (connect, flags) in LOADS.items():
        with ExitStack() as opened:
            start = partial(cloud_service, "--pair", CHAT_PAIR, "--queue", "256", *flags)
            services = {mode: opened.enter_context(start("--batch", most)) for mode, most in MODES.items()}
            connected = {mode: connect(service.url) for mode, service in services.items()}
            for client in connected.values():
                client(prompts[0])
            for count in options.clients:

                def measure(mode: str, count: int = count, clients: Mapping[str, Client] = connected) -> Measured:
                    return Measured.of(*load_with(clients[mode], count, prompts, options.seconds), expected)

                results = alternated(measure, options.windows)
                rows.append({"clients": count, "load": load, **compared(results)})
                print(rows[-1], file=sys.stderr, flush=True)
    publish(options, "batching", CLIENT_COLUMNS, rows)


def alternated(measure: Callable[[str], Measured], windows: int) -> dict[str, list[Measured]]:
    """Measure all modes in each window, in alternating order, so that other load affects them alike."""
    results: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    for window in range(windows):
        for mode in [*MODES][:: -1 if window % 2 else 1]:
            results[mode].append(measure(mode))
    return results


def compared(results: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """Return the medians of both modes, and median and range of the paired ratios of the speeds."""
    pairs = zip(results["on"], results["off"], strict=True)
    ratios = [on.tokens_per_second / off.tokens_per_second for on, off in pairs]
    names = ("tokens_per_second", "p50_s", "p95_s", "fairness")
    medians = {
        mode: {name: statistics.median(getattr(window, name) for window in windows) for name in names}
        for mode, windows in results.items()
    }
    every = [window for windows in results.values() for window in windows]
    return {
        **medians,
        "ratio": statistics.median(ratios),
        "range": (min(ratios), max(ratios)),
        "texts": sum(window.texts for window in every),
        "wrong": sum(window.wrong for window in every),
    }


def run_visitor(url: str, number: int, prompts: Sequence[Prompt], end: float, visits: list[tuple[Visit, int]]) -> None:
    """Press Run until `end`, with another prompt each time."""
    client, index = PageClient(url, f"visitor{number}"), number
    settings = {"method": "nasd", "temperature": 0, "top-p": 1, "max-tokens": MAX_TOKENS, "compare": False}
    while time.monotonic() < end:
        chosen = index % len(prompts)
        frames = client.frames({**settings, "prompt": prompts[chosen].text})
        visits.append((visit(frames, seconds_since(time.monotonic())), chosen))
        index += 7


def visitor_figures(
    visits: Sequence[Sequence[tuple[Visit, int]]], expected: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Return the record of the table; `visits`: runs of each visitor with the index of their prompt."""
    runs = [run for column in visits for run in column]
    waits = [run.first_token_s for run, _ in runs if run.first_token_s is not None]
    return {
        "runs": len(runs),
        "lost": sum(run.gaps > 0 or not run.over for run, _ in runs),
        "wrong": sum(run.done and run.tokens != list(expected[prompt]) for run, prompt in runs),
        "failed": sum(run.over and not run.done for run, _ in runs),
        "p50_s": percentile(waits, 0.5),
        "p95_s": percentile(waits, 0.95),
        "fairness": jain_index([sum(run.done for run, _ in column) for column in visits]),
    }


def visitors(options: argparse.Namespace) -> None:
    """Load the page with visitors who press Run again after each run."""
    prompts = load_prompts()[::PROMPT_STEP]
    expected = ar_texts(Recipe(method="ar", temperature=0.0, max_tokens=MAX_TOKENS), prompts)
    records = []
    for mode, most in MODES.items():
        visits: list[list[tuple[Visit, int]]] = [[] for _ in range(options.visitors)]
        with page_process(SPECDEMO_BATCH=most) as (url, _):
            end = time.monotonic() + options.seconds
            threads = [
                threading.Thread(target=run_visitor, args=(url, number, prompts, end, visits[number]))
                for number in range(options.visitors)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            passes = httpx.get(f"{url}health").json()["texts_per_pass"]
        counts = [sum(passes.get(str(texts), 0) for texts in range(*bounds)) for bounds in pairwise(HISTOGRAM)]
        histogram = " / ".join(f"{count:,}" for count in counts) if passes else ""
        records.append({**visitor_figures(visits, expected), "batching": mode, "histogram": histogram})
    publish(options, "visitors", VISITOR_COLUMNS, records)


STUDIES = {
    "clients": Study(clients, {"clients": [1, 4, 8, 16, 32], "windows": 4, "seconds": 3.0}),
    "visitors": Study(visitors, {"visitors": 50, "seconds": 60.0}),
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
