"""Measurements from the page: a timer shows the results, whatever happens to the stream of the event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from specdemo.bench.measure import BenchProgress
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, PanelParts
from specdemo.ui.tabs.sweep import Sweep, SweepResult
from specdemo.worker import Stream, Worker

PATIENCE = 60.0
VISITOR = SimpleNamespace(session_hash="visitor", client=None)
SWEEP = Sweep((Recipe(method="ar"),), (Prompt("code", "code 1", "a"), Prompt("code", "code 2", "b")))


@dataclass
class Result(SweepResult):
    """Two prompts, the second one of which waits for the gate of the service."""

    def start(self, service: Any, session: str, address: str) -> Stream[Any]:
        stream: Stream[Any] = service.worker.submit(service.items)
        service.started = stream
        return stream


def handlers(blocks: gr.Blocks, button: gr.Button) -> tuple[Any, Any]:
    """Functions of a button and of the timer."""
    events = [(fn.targets[0], fn.fn) for fn in blocks.fns.values()]
    (pressed,) = [function for target, function in events if target == (button._id, "click")]
    (tick,) = [function for (_, name), function in events if name == "tick"]
    return pressed, tick


class Bench:
    """A service with one worker, and a panel."""

    def __init__(self) -> None:
        self.worker, self.gate = Worker(), threading.Event()
        with gr.Blocks() as blocks:
            self.parts, results = PanelParts.laid_out("bench")
            with results:
                self.report = gr.Markdown()
            self.panel = MeasurementPanel(self, self.parts)  # type: ignore[arg-type]
            self.panel.connect(
                [], [self.report], lambda *_: Result(SWEEP), lambda result: len(result.records), self.shown
            )
        self.measure, self.show = handlers(blocks, self.parts.buttons[0])

    def shown(self, _: SweepResult, records: int) -> dict[Any, Any]:
        return {self.report: f"{records} records"}

    def items(self) -> Iterator[Any]:
        yield BenchProgress(1, 2, "code 1")
        yield {"name": "code 1"}
        while not self.gate.is_set():
            yield BenchProgress(2, 2, "code 2")
        yield {"name": "code 2"}

    async def press(self, messages: int) -> None:
        """Press *Measure* and lose the connection after some messages."""
        steps = self.measure(VISITOR)
        for _ in range(messages):
            await anext(steps)
        await steps.aclose()


@pytest.fixture
def bench() -> Iterator[Bench]:
    started = Bench()
    yield started
    started.gate.set()
    started.worker.close()


def words(values: dict[Any, Any], bench: Bench) -> str:
    return str(values.get(bench.parts.status, ""))


def test_an_event_without_a_listener_ends_the_measurement_and_shows_its_part(bench: Bench) -> None:
    asyncio.run(bench.press(3))
    stream: Stream[Any] = bench.started  # type: ignore[attr-defined]
    assert stream.wait(PATIENCE) and stream.stopping
    shown = bench.show(VISITOR)
    assert "stopped: partial, 1 of 2 prompts are measured" in words(shown, bench)
    assert shown[bench.report] == "1 records" and shown[bench.parts.results].visible is True


def test_lost_messages_do_not_lose_the_results(bench: Bench) -> None:
    async def measured() -> list[dict[Any, Any]]:
        steps = bench.measure(VISITOR)
        first = await anext(steps)
        assert first[bench.panel._timer].active is True and first[bench.parts.buttons[0]].interactive is False
        assert list(bench.show(VISITOR)) == [bench.panel._timer]  # still running
        bench.gate.set()
        return [values async for values in steps]

    messages = asyncio.run(measured())
    assert not any("done" in words(values, bench) for values in messages)
    shown, repeated, after = (bench.show(VISITOR) for _ in range(3))
    assert "done: 2 runs on 2 prompts" in words(shown, bench) and shown[bench.report] == "2 records"
    assert words(repeated, bench) == words(shown, bench)  # replaces a late message
    assert repeated[bench.panel._timer].active is False and repeated[bench.parts.buttons[0]].interactive is True
    assert not words(after, bench) and after[bench.panel._timer].active is False
