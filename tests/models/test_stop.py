"""Signals, Stop and time limits end a pass that is under way; the next pass starts with an empty cache."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from fakes.forked_process import ForkedProcess
from fakes.slow_model import slow_model, slow_pass
from fakes.trace_records import header
from torch import Tensor

from specdemo.core.events import End, Event, Header
from specdemo.core.metrics import Metrics
from specdemo.core.step import Draft
from specdemo.core.trace import from_json
from specdemo.models.engines.native import NativeEngine
from specdemo.models.kv_cache import CachedModel
from specdemo.ui.limits import TimeBudget
from specdemo.worker import Worker

PATIENCE = 60.0


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM])
def test_signals_end_a_pass_of_the_main_thread(number: signal.Signals) -> None:
    with closing(ForkedProcess(slow_pass)) as process:
        assert process.stdout.readline() == "begin\n"
        process.send_signal(number)
        out, err = process.communicate()
        assert out == "" and "KeyboardInterrupt" in err and process.wait() != 0


def test_stop_ends_a_pass_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    model, began, worker = CachedModel(slow_model()), threading.Event(), Worker()
    call = NativeEngine._call

    def announced(self: NativeEngine, *arguments: Any) -> list[Tensor]:
        began.set()
        return call(self, *arguments)

    monkeypatch.setattr(NativeEngine, "_call", announced)
    text = [i % 50 for i in range(250)]

    def job() -> Iterator[str]:
        model.score(text, Draft())
        yield "complete"

    stream = worker.submit(job)
    assert began.wait(PATIENCE)
    stream.stop()
    assert stream.wait(PATIENCE) and stream.items == [] and stream.error is None
    worker.close()
    assert model.kv_bytes == 0
    assert torch.equal(model.score(text[:3], Draft()), CachedModel(model.model).score(text[:3], Draft()))


def test_a_time_limit_ends_a_pass() -> None:
    model, worker, completed = CachedModel(slow_model()), Worker(), []

    def events() -> Iterator[Event]:
        yield from_json(header(), Metrics())
        model.score([1] * 250, Draft())
        completed.append(True)

    stream = worker.submit(lambda: TimeBudget(0.2).spend(events()))
    assert stream.wait(PATIENCE) and stream.error is None and not completed
    assert [type(event) for event in stream.items] == [Header, End] and stream.items[1].reason == "cancelled"
    worker.close()
