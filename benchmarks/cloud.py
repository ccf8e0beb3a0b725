"""A cloud to measure: the service in a process of its own, and what the rounds of some runs with it add up to."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from specdemo.core.events import End, StepEvent
from specdemo.core.step import Step
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe


@dataclass(frozen=True)
class Service:
    """A service that listens."""

    url: str
    process: psutil.Process

    @property
    def rss_bytes(self) -> int:
        """Its resident memory now."""
        return self.process.memory_info().rss


@contextmanager
def cloud(*options: str) -> Iterator[Service]:
    """The service, started with `options` on a free port of this machine, and ended afterwards."""
    command = [sys.executable, "-m", "specdemo", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().removeprefix("listening on ").strip()
            yield Service(url, psutil.Process(process.pid))
        finally:
            process.terminate()


@dataclass(frozen=True)
class Rounds:
    """What the rounds of some runs add up to, the prefill left out."""

    tokens: int
    drafted: tuple[int, ...]  # in each round
    betas: tuple[float, ...]  # of every tested token
    draft_s: float
    cloud_s: float
    wire_s: float  # from the question to the verdict, but for the cloud's own time
    host_s: float
    up: float
    down: float
    rows: float

    @property
    def count(self) -> int:
        """How many rounds."""
        return len(self.drafted)

    @property
    def gamma(self) -> float:
        """Tokens drafted a round."""
        return sum(self.drafted) / self.count

    @property
    def alpha(self) -> float:
        """The mean of beta; 0 where nothing was tested."""
        return statistics.mean(self.betas) if self.betas else 0.0

    @property
    def round_s(self) -> float:
        """Seconds of a round."""
        return (self.draft_s + self.cloud_s + self.wire_s + self.host_s) / self.count


def rounds(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool, apart_s: float = 0.0) -> Rounds:
    """Run `recipe` on every prompt; between two rounds nothing is done for `apart_s`, which is in no figure."""
    steps: list[Step] = []
    for prompt in prompts:
        events = []
        for event in generate(recipe, prompt.text, pool):
            events.append(event)
            time.sleep(apart_s)
        if isinstance(events[-1], End) and events[-1].error:
            raise RuntimeError(events[-1].error)
        steps += [event.step for event in events if isinstance(event, StepEvent)][1:]
    cloud_s = sum(step.verdict.notes["cloud_s"] for step in steps)
    return Rounds(
        sum(len(step.tokens) for step in steps),
        tuple(len(step.draft) for step in steps),
        tuple(beta for step in steps for beta in step.betas),
        sum(step.draft_s for step in steps),
        cloud_s,
        sum(step.verify_s for step in steps) - cloud_s,
        sum(step.host_s for step in steps),
        *(sum(step.verdict.notes[name] for step in steps) for name in ("bytes_up", "bytes_down", "rows")),
    )
