"""Streams from the worker to the browser: polling, frames of a run, and their WebSocket.

Gradio's events block the decoding thread (GIL) for about 4 ms per frame, a socket for 0.4 ms. The event starts the run
and replaces a socket that cannot be opened.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from traceback import format_tb
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from specdemo.core.errors import FULL_DISK, UserError, write_error
from specdemo.core.events import Event
from specdemo.ui.frames import Run
from specdemo.ui.method_names import with_method_names
from specdemo.ui.run_store import RunStore
from specdemo.worker import Stream, WorkerBusy

_POLL_S = 1 / 12
GRACE_S = 20.0  # a run without a listener is stopped after this time
LONGEST_REASON = 600  # characters; error messages can quote arbitrary input
FRAMES = "/frames/{run}"
_Listeners = dict[str, set[asyncio.Event]]  # keys are ids of runs
LaneEvents = Stream[tuple[str, Event]]
log = logging.getLogger(__name__)
T = TypeVar("T")


async def drain(stream: Stream[T]) -> AsyncGenerator[list[T]]:
    """Yield new items until the job has finished. Closing the iterator cancels the job."""
    count = 0
    try:
        while True:
            done = stream.done  # read before draining, otherwise the last items are lost
            items = stream.items[count:]
            count += len(items)
            yield items
            if done:
                return
            await asyncio.sleep(_POLL_S)
    finally:
        stream.stop()


def reason(error: BaseException) -> str:
    """Convert an exception to a sentence for the visitor; log unexpected exceptions."""
    if isinstance(error, (UserError, WorkerBusy)):
        text = with_method_names(str(error))
    elif isinstance(error, OSError) and error.errno in (*FULL_DISK, errno.EROFS):
        text = str(write_error("to the disk of this host", error))
    else:
        # The log omits the message, which can quote the text of a visitor.
        log.error("a run failed: %s\n%s", type(error).__name__, "".join(format_tb(error.__traceback__)))
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"


def _queue_position(ahead: int, seconds: float | None) -> str:
    return f"{ahead} ahead" + ("" if seconds is None else f", about {max(1, round(seconds))} s")


def trace_route(path: str, runs: RunStore) -> Route:
    """Return the route that opens the trace in the body."""

    async def opened(request: Request) -> Response:
        text = (await request.body()).decode("utf-8-sig", "replace")
        address = request.client.host if request.client else ""
        frame = await asyncio.to_thread(runs.import_trace, text, address)
        return Response(frame, media_type="application/json")

    return Route(path, opened, methods=["POST"])


@contextmanager
def _listening(listeners: _Listeners, run: Run) -> Iterator[asyncio.Event]:
    changed = asyncio.Event()
    listeners.setdefault(run.id, set()).add(changed)
    try:
        yield changed
    finally:
        listeners[run.id].discard(changed)
        if not listeners[run.id]:
            del listeners[run.id]


class Sockets:
    """WebSockets of runs: advance a run and send its frames. Access requires only the unguessable id of the run."""

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs
        self._listeners: _Listeners = {}
        self._fallbacks: _Listeners = {}

    async def play(self, run: Run, stream: LaneEvents) -> None:
        """Advance `run` to its end and notify its listeners."""
        try:
            async with aclosing(drain(stream)) as batches:
                async for batch in batches:
                    phase = run.phase
                    for lane, event in batch:
                        run.absorb(lane, event)
                    if not stream.started and (ahead := stream.worker.ahead(stream)):
                        run.phase = ("queued", _queue_position(ahead, stream.worker.expected_wait_s(stream)))
                    if batch or run.phase != phase:
                        self.notify(run)
                    if self._abandoned(run):
                        break
            await asyncio.to_thread(run.finish, reason(stream.error) if stream.error else None)
        except Exception as error:
            run.finish(reason(error))
        self.notify(run)

    def _abandoned(self, run: Run) -> bool:
        if run.id in self._listeners or run.id in self._fallbacks:
            run.seen = time.monotonic()
        return time.monotonic() - run.seen > GRACE_S

    async def fallback_frames(self, run: Run) -> AsyncGenerator[str]:
        """Yield frames while no socket receives them."""
        start, shown = 0, ""
        with _listening(self._fallbacks, run) as changed:
            while not run.over:
                if run.id not in self._listeners and (frame := run.frame(start)) != shown:
                    start, shown = len(run.records), frame
                    yield frame
                await changed.wait()
                changed.clear()

    def notify(self, run: Run) -> bool:
        """Notify the listeners of `run`; return False without a socket. Call in the server's thread."""
        listeners = self._listeners.get(run.id, set())
        for changed in listeners | self._fallbacks.get(run.id, set()):
            changed.set()
        return bool(listeners)

    def routes(self) -> list[BaseRoute]:
        """Return the routes `/frames/{run}`: a socket sends a run's frames from record `from` (default 0) to the last.

        POST stops the run, since its page is left. A closed socket does not: after interruptions the page resumes.
        """
        return [WebSocketRoute(FRAMES, self._serve), Route(FRAMES, self._leave, methods=["POST"])]

    async def _leave(self, request: Request) -> Response:
        self._runs.stop_run(request.path_params["run"])
        return Response(status_code=204)

    async def _serve(self, socket: WebSocket) -> None:
        run = self._runs.get(socket.path_params["run"])
        if run is None:
            return await socket.close()
        await socket.accept()
        start = socket.query_params.get("from", "")
        count = int(start) if start.isdecimal() and len(start) < 10 else 0
        with _listening(self._listeners, run) as changed:
            closed = asyncio.ensure_future(self._until_closed(socket, changed))
            try:
                with suppress(WebSocketDisconnect):
                    while not (run.over or closed.done()):
                        count = await self._send(socket, run, count)
                        await changed.wait()
                        changed.clear()
                    if not closed.done():
                        await self._send(socket, run, count)
                        await socket.close()
            finally:
                closed.cancel()

    async def _until_closed(self, socket: WebSocket, changed: asyncio.Event) -> None:
        while (await socket.receive())["type"] != "websocket.disconnect":
            pass
        changed.set()

    async def _send(self, socket: WebSocket, run: Run, start: int) -> int:
        frame, end = run.frame(start), len(run.records)
        await socket.send_text(frame)
        return end
