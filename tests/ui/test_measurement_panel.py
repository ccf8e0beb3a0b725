"""Measurements and calibrations from the page: a timer shows the results, also after a lost response."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from specdemo.bench.measure import BenchProgress
from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import PAIRS, Pair
from specdemo.ui.service import Service
from specdemo.ui.settings import OPTIONS, setting_of
from specdemo.ui.tabs.edge import calibration_recipe
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, PanelMeasurement
from specdemo.worker import Stream

PATIENCE = 60.0
VISITOR = SimpleNamespace(session_hash="visitor", client=None)


class Bench:
    """A panel that measures two prompts, the second one of which waits for a gate."""

    def __init__(self) -> None:
        self.readable, self.gate = True, threading.Event()
        self.service = Service(ModelPool(), lambda *_: (event for event in ()))
        with gr.Blocks() as blocks:
            self.panel, results = MeasurementPanel.laid_out(self.service, "bench")
            with results:
                self.report = gr.Markdown()
            self.panel.connect([], [self.report], self.prepare)
        functions = {fn.targets[0]: fn.fn for fn in blocks.fns.values()}
        self.press = functions[self.panel.buttons[0]._id, "click"]
        self.tick = functions[self.panel._timer._id, "tick"]

    def prepare(self, session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        return PanelMeasurement(self.items, self.show, lambda records: (len(records), 2), "prompts")

    def show(self, records: list[Any]) -> dict[Any, Any]:
        if not self.readable:
            raise ValueError("the records cannot be shown")
        return {self.report: f"{len(records)} records"} if records else {}

    @property
    def stream(self) -> Stream[Any]:
        stream: Stream[Any] = self.service.visitors.find(VISITOR.session_hash).measurements[self.panel].stream
        return stream

    def items(self) -> Iterator[Any]:
        yield BenchProgress(1, 2, "code 1")
        yield {"name": "code 1"}
        while not self.gate.is_set():
            yield BenchProgress(2, 2, "code 2")
        yield {"name": "code 2"}

    def words(self, values: dict[Any, Any]) -> str:
        return str(values.get(self.panel.status, ""))


@pytest.fixture
def bench() -> Iterator[Bench]:
    started = Bench()
    yield started
    started.gate.set()
    started.service.worker.close()


def test_a_lost_response_is_repeated_by_the_next_one(bench: Bench) -> None:
    pressed = bench.press(VISITOR)
    assert pressed[bench.panel._timer].active is True and pressed[bench.panel.buttons[0]].interactive is False
    assert list(bench.tick(VISITOR)) == [bench.panel.status]  # still running
    bench.gate.set()
    assert bench.stream.wait(PATIENCE)
    lost, shown = bench.tick(VISITOR), bench.tick(VISITOR)
    assert bench.words(lost) == bench.words(shown) and "done: 2 of 2 prompts are measured" in bench.words(shown)
    assert shown[bench.report] == "2 records"
    assert shown[bench.panel._timer].active is False and shown[bench.panel.buttons[0]].interactive is True


def test_nothing_is_stored_for_a_visitor_who_has_left(bench: Bench) -> None:
    bench.press(VISITOR)
    stream = bench.stream
    bench.service.visitors.end_session(VISITOR.session_hash)
    assert stream.wait(PATIENCE) and stream.stopping
    assert not bench.service.visitors.find(VISITOR.session_hash).measurements


def test_an_error_in_the_results_is_not_repeated(bench: Bench) -> None:
    bench.gate.set()
    bench.press(VISITOR)
    assert bench.stream.wait(PATIENCE)
    bench.readable = False
    with pytest.raises(ValueError, match="cannot be shown"):
        bench.tick(VISITOR)
    assert bench.tick(VISITOR)[bench.panel._timer].active is False


def test_a_second_press_stops_the_first_measurement(bench: Bench) -> None:
    bench.press(VISITOR)
    first = bench.stream
    bench.press(VISITOR)
    assert first.wait(PATIENCE) and first.stopping and not bench.stream.stopping


SETTINGS = {name: setting_of(option, option.default) for name, option in OPTIONS.items()}


def test_drafts_are_verified_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = calibration_recipe({**SETTINGS, "pair": "bundled", "mode": "speculative", "method": "ar"}, "cpu")
    assert recipe.cloud is None and recipe.method == "draft" and recipe.models[1]
    with pytest.raises(UserError, match="temperature"):
        calibration_recipe({**SETTINGS, "temperature": -1}, "cpu")
    monkeypatch.setitem(PAIRS, "alone", Pair("target without drafter", "target", None, 2, method="nasd"))
    with pytest.raises(UserError, match="gates need .*: add a drafter, or choose pair bundled"):
        calibration_recipe({**SETTINGS, "pair": "alone", "method": "nasd"}, "cpu")
