"""Measurements and calibrations from the page: a timer shows the results, and thresholds are remembered by pair."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from specdemo.bench.calibration import PERCENTILES, Calibration
from specdemo.bench.measure import BenchProgress
from specdemo.core.errors import UserError
from specdemo.models.zoo import PAIRS, Pair
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe
from specdemo.ui.settings import OPTIONS, setting_of
from specdemo.ui.tabs import calibration
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


SETTINGS = {name: setting_of(option, option.default) for name, option in OPTIONS.items()}
RESULT = Calibration({"nll": 1.5, "entropy": 3.0, "margin": 0.1}, 90, 3, "dropout needs a *Llama*")


def test_drafts_are_verified_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = calibration.calibration_recipe(
        {**SETTINGS, "pair": "bundled", "mode": "speculative", "method": "ar"}, "cpu"
    )
    assert recipe.cloud is None and recipe.method == "draft" and recipe.models[1]
    with pytest.raises(UserError, match="temperature"):
        calibration.calibration_recipe({**SETTINGS, "temperature": -1}, "cpu")
    monkeypatch.setitem(PAIRS, "alone", Pair("target without drafter", "target", None, 2, method="nasd"))
    with pytest.raises(UserError, match="pair alone has none"):
        calibration.calibration_recipe({**SETTINGS, "pair": "alone", "method": "nasd"}, "cpu")


def test_thresholds_are_shown_beside_the_guide() -> None:
    words = calibration.describe_calibration(RESULT)
    assert "90 draft tokens of 3 texts. There is no variance: dropout needs a \\*Llama\\*." in words
    assert "| entropy, bits | 80 | 3 | 2.5 |" in re.sub(" +", " ", words)
    assert "`--gate nll entropy margin --gate-nll 1.5" in words


def restored(stored: object, pair: str, current: list[float]) -> list[float]:
    call = f"console.log(JSON.stringify(({calibration._REMEMBERED_JS})(...JSON.parse(process.argv[1]))))"
    values = json.dumps([stored, pair, None, "", *current])
    return json.loads(subprocess.run(["node", "-e", call, values], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not shutil.which("node"), reason="runs the script in Node.js")
def test_thresholds_return_with_their_pair() -> None:
    """The browser's script finds the entry of the server by its key."""
    current = [SETTINGS[f"gate_{name}"] for name in PERCENTILES]
    bundled = {**SETTINGS, "pair": "bundled"}
    stored = calibration.remembered(None, bundled, RESULT.thresholds)
    stored = calibration.remembered(stored, {**SETTINGS, "pair": "öther"}, {"nll": 9.0})
    assert restored(stored, "bundled", current) == [1.5, 3.0, 0.1, SETTINGS["gate_variance"]]
    assert restored(stored, "öther", current)[0] == 9 and restored(None, "bundled", current) == current
    assert restored(stored, "gpt2-xl", current) == current
    assert calibration.remembered("broken", bundled, RESULT.thresholds) == {
        '["bundled","",""]': [1.5, 3.0, 0.1, SETTINGS["gate_variance"]]
    }
