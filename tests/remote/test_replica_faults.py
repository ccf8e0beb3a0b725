"""Faults of service processes during a run: another process continues, and the text is that of an undisturbed run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from fakes.forked_process import ForkedProcess, terminal
from fakes.trace_lines import trace_lines as generate

from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

pytestmark = pytest.mark.slow

PROMPT = "def read_lines(path):\n"
POOL = ModelPool()
COMMAND = ("serve", "--pair", "bundled", "--port", "0", "--device", "cpu")
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 1.0, "seed": 11},
}
FAULTS = {"killed": signal.SIGKILL, "drained": signal.SIGTERM, "frozen": signal.SIGSTOP}


class Replica:
    """Process of a service."""

    def __init__(self) -> None:
        self.process = ForkedProcess(terminal, *COMMAND)
        self.url = self.process.stdout.readline().removeprefix("listening on ").strip()

    def close(self) -> None:
        self.process.close()


@pytest.fixture(scope="module")
def survivor() -> Iterator[Replica]:
    with closing(Replica()) as replica:
        yield replica


@pytest.fixture
def victim() -> Iterator[Replica]:
    with closing(Replica()) as replica:
        yield replica


def recipe(*urls: str, **settings: Any) -> Recipe:
    cloud = CloudConfig(" ".join(urls), deadline_ms=2000, lost_after_s=120)
    return Recipe(device="cpu", max_tokens=24, cloud=cloud, **settings)


def in_steps(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line["remote"].get(name, 0.0) for line in lines if "i" in line)


def text_of(lines: list[dict[str, Any]]) -> list[int]:
    return [token for line in lines if "i" in line for token in line["tokens"]]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("fault", FAULTS)
def test_another_service_continues(fault: str, settings: str, survivor: Replica, victim: Replica) -> None:
    """The signal follows the first step in which the victim responded; a new session decides which service is first."""
    values = SETTINGS[settings]
    expected = text_of(list(generate(recipe(survivor.url, **values), PROMPT, POOL)))
    port = victim.url.rpartition(":")[2]
    for _ in range(64):  # one test in 2^64 finds no such session
        lines, hit = [], False
        for line in generate(recipe(victim.url, survivor.url, **values), PROMPT, POOL):
            lines.append(line)
            if line.get("i") == 2 and any(earlier.get("replica", "").endswith(f":{port}") for earlier in lines):
                victim.process.send_signal(FAULTS[fault])
                if fault != "frozen":  # a draining service still responds to steps
                    victim.process.wait()
                hit = True
        assert text_of(lines) == expected and lines[-1]["end"] in ("length", "stop")
        assert in_steps(lines, "switched") == hit and not in_steps(lines, "numerics")
        if hit:
            assert in_steps(lines, "reread") > len(lines[0].get("prompt_tokens", ())) and in_steps(lines, "gap_s") > 0
            return
    raise AssertionError("the victim was never the first choice")
