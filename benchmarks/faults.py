"""Latencies under faults and load by single visitors: tables of docs/reliability.md.

`python -m benchmarks.faults STUDY --write`. The service of the page runs in this process, with the limits of a public
page.

`prompt`: a visitor sends the longest prompt; another decodes short texts one after another until it is read. Then a run
with the same prompt is stopped during its prefill.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

from benchmarks.tables import Study, publish, study_command
from specdemo.core.events import Event, Header, StepEvent
from specdemo.core.metrics import percentile
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.lane import SPEC
from specdemo.ui.limits import PUBLIC
from specdemo.ui.service import Service
from specdemo.worker import Stream

DOCUMENT = "docs/reliability.md"
TABLES = {"long-prompt": DOCUMENT}
SHORT_TOKENS = 8
STOP_AFTER_S = 4.0
POLL_S = 0.002
PROMPT_COLUMNS = {
    "prompt tokens": "{tokens:,}",
    "prefill s, alone": "{alone_s:.1f}",
    "prefill s, with runs of another visitor": "{prefill_s:.1f}",
    "runs of 8 tokens": "{runs}",
    "first token p50 / p95 s": "{first_p50_s:.2f} / {first_p95_s:.2f}",
    "complete run p50 / p95 s": "{run_p50_s:.2f} / {run_p95_s:.2f}",
    "longest chunk s": "{chunk_s:.2f}",
    "end after Stop s": "{stop_s:.2f}",
}


class Visitor:
    """A visitor of the service, with an address of its own."""

    def __init__(self, service: Service, number: int) -> None:
        self._service, self._address = service, f"198.51.100.{number}"

    def start(self, prompt: str, max_tokens: int) -> Stream[tuple[str, Event]]:
        """Submit a run with the chat model in a new conversation."""
        self._service.leave(self._address)
        recipe = Recipe(pair=CHAT_PAIR, max_tokens=max_tokens, **PAIRS[CHAT_PAIR].settings)
        return self._service.start([(SPEC, recipe)], prompt, self._address, self._address)


def arrivals(stream: Stream[tuple[str, Event]]) -> Iterator[tuple[Event, float]]:
    """Yield the events of a run with the seconds since the call."""
    start, count = time.perf_counter(), 0
    while not (stream.done and count == len(stream.items)):
        for _, event in stream.items[count:]:
            count += 1
            yield event, time.perf_counter() - start
        time.sleep(POLL_S)


def prefill_times(stream: Stream[tuple[str, Event]]) -> tuple[int, float, float]:
    """Return the prompt tokens, the seconds of the prefill, and those of its longest chunk."""
    times: list[float] = []
    for event, seconds in arrivals(stream):
        if isinstance(event, Header):
            tokens = len(event.prompt_tokens)
        if times or isinstance(event, Header):
            times.append(seconds)
        if isinstance(event, StepEvent):
            break
    return tokens, times[-1] - times[0], max(b - a for a, b in pairwise(times))


def longest_prompt(characters: int) -> str:
    """Return the texts of the prompt set, repeated to `characters`."""
    texts = "\n\n".join(prompt.text for prompt in load_prompts())
    return (texts * (1 + characters // len(texts)))[:characters]


def _prompt(options: argparse.Namespace) -> None:
    """Measure the delay of another visitor during the prefill of a long prompt."""
    prompt = longest_prompt(options.characters)
    service = Service(ModelPool(), generate, replace(PUBLIC, per_minute=None, max_seconds=None))
    with closing(service.worker):
        reader, other = Visitor(service, 1), Visitor(service, 2)
        other.start("Hello", 1).wait()  # loads the model
        tokens, alone_s, chunk_s = prefill_times(reader.start(prompt, 1))
        long, firsts, totals = reader.start(prompt, 1), list[float](), list[float]()
        began = time.perf_counter()
        while not long.done:
            for event, seconds in arrivals(other.start(f"Count to {len(firsts) + 3}.", SHORT_TOKENS)):
                if isinstance(event, StepEvent) and len(firsts) == len(totals):
                    firsts.append(seconds)
            totals.append(seconds)
        prefill_s = time.perf_counter() - began
        stopped = reader.start(prompt, 1)
        time.sleep(STOP_AFTER_S)
        start = time.perf_counter()
        stopped.stop()
        stopped.wait()
        stop_s = time.perf_counter() - start
    record = {
        "tokens": tokens,
        "alone_s": alone_s,
        "prefill_s": prefill_s,
        "runs": len(totals),
        "first_p50_s": statistics.median(firsts),
        "first_p95_s": percentile(firsts, 0.95),
        "run_p50_s": statistics.median(totals),
        "run_p95_s": percentile(totals, 0.95),
        "chunk_s": chunk_s,
        "stop_s": stop_s,
    }
    publish(options, "long-prompt", PROMPT_COLUMNS, [record])


STUDIES = {"prompt": Study(_prompt, {"characters": 19_900})}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
