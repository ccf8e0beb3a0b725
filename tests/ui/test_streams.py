"""Frames of a run over a websocket: every client receives all frames, and slow clients do not delay others."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fakes.trace_records import absorb, end, header, step
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from specdemo.ui.lane import SPEC
from specdemo.ui.run_store import RunStore
from specdemo.ui.streams import Sockets

LINES = [header(), step(0, pieces=["a"]), step(1, pieces=["b", "c"], draft=("b", "x"), accepted=(0,), tested=2), end()]


class House:
    """Server with one run, to which lines are added in the server's thread."""

    def __init__(self, client: TestClient, runs: RunStore, sockets: Sockets) -> None:
        self.client, self._sockets = client, sockets
        self.run = runs.new("visitor", (SPEC,))

    def add(self, line: dict) -> bool:
        return self._call(lambda: absorb(self.run, SPEC, line))

    def finish(self) -> bool:
        return self._call(self.run.finish)

    def _call(self, change) -> bool:
        def job() -> bool:
            change()
            return self._sockets.tell(self.run)

        async def in_turn() -> bool:
            return job()

        return self.client.portal.call(in_turn)

    def listen(self, run_id: str | None = None):
        return self.client.websocket_connect(f"/frames/{run_id or self.run.id}")


@pytest.fixture
def house() -> Iterator[House]:
    runs = RunStore()
    sockets = Sockets(runs)
    with TestClient(Starlette(routes=sockets.routes())) as client:
        yield House(client, runs, sockets)


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


def test_late_and_parallel_listeners_receive_everything(house: House) -> None:
    with house.listen() as early:
        heard = [early.receive_json()]
        for line in LINES[:2]:
            house.add(line)
            heard.append(early.receive_json())
        with house.listen() as late:
            caught_up = [late.receive_json()]
            house.add(LINES[2])
            heard.append(early.receive_json())
            caught_up.append(late.receive_json())
    assert records(heard) == records(caught_up) == json.loads(house.run.frame(0))["r"]


def test_closed_socket_ends_the_listener(house: House) -> None:
    with house.listen() as socket:
        socket.receive_json()
        socket.send_text("nobody asked")
        assert house.add(LINES[0]) and socket.receive_json()["r"]
    assert not house.add(LINES[1])


@pytest.mark.parametrize("run_id", ["no-such-run", "%2e%2e"])
def test_unknown_runs_are_rejected(house: House, run_id: str) -> None:
    with pytest.raises(WebSocketDisconnect), house.listen(run_id):
        pass


def test_finished_run_is_one_frame(house: House) -> None:
    for line in LINES:
        house.add(line)
    house.finish()
    with house.listen() as socket:
        assert socket.receive_json() == json.loads(house.run.frame(0))
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()


def test_markup_is_escaped_in_frames(house: House) -> None:
    house.add(header(prompt="<b>"))
    with house.listen() as socket:
        sent = socket.receive_text()
    assert "<" not in sent and json.loads(sent)["r"][0]["head"]["prompt"] == "<b>"
