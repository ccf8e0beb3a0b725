"""Frames of a run over a WebSocket and on request: every client receives all frames."""

import asyncio
import errno
import gc
import json
import os
import weakref
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from fakes.trace_lines import events_of
from fakes.trace_records import absorb, end, header, step
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from specdemo.core.events import Event
from specdemo.ui import streams
from specdemo.ui.lane import SPEC
from specdemo.ui.limits import HostLimits, RunRates
from specdemo.ui.run_store import RunStore
from specdemo.ui.streams import frame_routes, play
from specdemo.worker import Worker

pytestmark = pytest.mark.slow

LINES = [header(), step(0, pieces=["a"]), step(1, pieces=["b", "c"], draft=("b", "x"), accepted=(0,), tested=2), end()]


class House:
    """Server with one run, to which lines are added in the server's thread."""

    def __init__(self, client: TestClient, runs: RunStore) -> None:
        self.client = client
        self.run = runs.new("visitor", (SPEC,))

    def add(self, line: dict) -> bool:
        return self._call(lambda: absorb(self.run, SPEC, line))

    def finish(self) -> bool:
        return self._call(self.run.finish)

    def _call(self, change) -> bool:
        def job() -> bool:
            change()
            self.run.notify()
            return bool(self.run.followers)

        async def in_turn() -> bool:
            return job()

        return self.client.portal.call(in_turn)

    def listen(self, run_id: str | None = None):
        return self.client.websocket_connect(f"/frames/{run_id or self.run.id}")


@pytest.fixture
def house() -> Iterator[House]:
    runs = RunStore()
    with TestClient(Starlette(routes=frame_routes(runs))) as client:
        yield House(client, runs)


def records(frames: list[dict]) -> list[dict]:
    """Records in a browser after these frames, by the start index of each."""
    have: list[dict] = []
    for frame in frames:
        assert frame["at"] == len(have), "a gap"
        have += frame["r"]
    return have


def test_listener_receives_the_run_in_order_until_its_end(house: House) -> None:
    assert not house.add(LINES[0]), "nobody listens yet"
    with house.listen() as socket:
        heard = [socket.receive_json()]
        for line in LINES[1:]:
            assert house.add(line)
            heard.append(socket.receive_json())
        house.finish()
        heard.append(socket.receive_json())
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()
    whole = json.loads(house.run.frame(0))
    assert records(heard) == whole["r"] and len(whole["r"]) == 3
    assert heard[-1]["over"] and not any(frame["over"] for frame in heard[:-1])
    assert not house.finish(), "who has heard the end no longer listens"


def test_a_reconnected_listener_receives_the_missing_records_only(house: House) -> None:
    for line in LINES[:2]:
        house.add(line)
    with house.listen() as socket:
        before = socket.receive_json()
    for line in LINES[2:]:
        house.add(line)
    house.finish()
    address = f"{house.run.id}?from={len(before['r'])}"
    with house.listen(address) as socket:
        after = socket.receive_json()
    assert records([before, after]) == json.loads(house.run.frame(0))["r"] and after["at"] == 2
    assert house.client.get(f"/frames/{address}").json() == after  # without a WebSocket


def test_run_ends_when_its_page_is_left_but_not_when_interrupted(house: House) -> None:
    stop = house.run.stop = Mock()
    house.add(LINES[0])
    with house.listen() as socket:
        socket.receive_json()
        socket.close(1001)
    assert not house.add(LINES[1])  # after the listener has ended
    assert not stop.called
    assert house.client.post("/frames/unknown").status_code == 204 and not stop.called
    assert house.client.post(f"/frames/{house.run.id}").status_code == 204 and stop.called


def test_a_run_that_nobody_follows_ends_after_the_grace_period(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "GRACE_S", 0.1)
    worker = Worker()

    def job() -> Iterator[tuple[str, Event]]:
        first, following, *_ = events_of(LINES)
        yield SPEC, first
        while True:
            yield SPEC, following

    stream = worker.submit(job)
    house.run.begin(stream.stop)
    try:
        house.client.portal.call(play, house.run, stream)
    finally:
        worker.close()
    assert stream.done and house.run.over and house.run.phase[0] == "stopped" and len(house.run.records) > 2


@pytest.mark.parametrize("run_id", ["no-such-run", "%2e%2e"])
def test_unknown_runs_are_rejected(house: House, run_id: str) -> None:
    with pytest.raises(WebSocketDisconnect), house.listen(run_id):
        pass
    assert house.client.get(f"/frames/{run_id}").status_code == 404


@pytest.mark.parametrize("left_first", [False, True])
def test_a_run_stopped_before_its_job_is_queued_does_not_start(left_first: bool) -> None:
    """A page can be left before the server has registered its run."""
    worker, runs = Worker(), RunStore()
    if left_first:
        runs.stop_run("left-before-begun")
    run = runs.new("one", (SPEC,), run_id="left-before-begun")
    if not left_first:
        runs.stop_run(run.id)
    stream = worker.submit(lambda: iter(range(1_000_000)))
    run.begin(stream.stop)
    assert stream.wait(60) and stream.error is None and len(stream.items) < 1_000_000
    worker.close()


def test_finished_runs_retain_no_events() -> None:
    """Their traces are text; neither the runs nor the limits of the visitor retain the stream."""
    worker, runs, rates = Worker(), RunStore(), RunRates(HostLimits(at_once=1))
    run = runs.new("one", (SPEC,))
    job = lambda: ((SPEC, event) for event in events_of(LINES))  # noqa: E731
    stream = rates.start("192.0.2.1", lambda: worker.submit(job))
    run.begin(stream.stop)
    asyncio.run(play(run, stream))
    worker.close()
    retained = weakref.ref(stream)
    del stream
    gc.collect()
    assert retained() is None and runs.get(run.id) is run and run.over
    rates.count("192.0.2.1")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written_is_named_on_the_page(code: int) -> None:
    worker, runs = Worker(), RunStore()
    run = runs.new("one", (SPEC,))

    def job() -> Iterator[tuple[str, Event]]:
        raise OSError(code, os.strerror(code))
        yield

    asyncio.run(play(run, worker.submit(job)))
    remedy = "free some space" if code == errno.ENOSPC else "choose a writable directory"
    assert run.phase == ("failed", f"cannot write to the disk of this host: {os.strerror(code)}: {remedy}")
    worker.close()
