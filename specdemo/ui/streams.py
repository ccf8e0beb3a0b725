"""Streams from the worker to the browser: polling, frames of a run, and their WebSocket.

Sending a frame through gradio's events blocks the decoding thread (GIL) for about 4 ms, through a socket for 0.4 ms.
The gradio event still starts and ends the run, and sends the frames where a socket cannot be opened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from traceback import format_tb

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from specdemo.core.errors import UserError
from specdemo.core.events import Event
from specdemo.ui.frames import Run
from specdemo.ui.run_store import RunStore
from specdemo.worker import Stream, Worker, WorkerBusy, WorkerGroup

_POLL_S = 1 / 12  # seconds between polls: latency below 150 ms at low load on the decoding thread
LONGEST_REASON = 600  # characters; error messages can quote arbitrary input
LaneEvents = Stream[tuple[str, Event]]
log = logging.getLogger(__name__)


async def drain(stream: Stream) -> AsyncIterator[list]:
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
        text = str(error)
    else:
        # without the message, which can quote the text of a visitor
        log.error("a run failed: %s\n%s", type(error).__name__, "".join(format_tb(error.__traceback__)))
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"


async def played(run: Run, stream: LaneEvents, worker: Worker | WorkerGroup, shown: str) -> AsyncIterator[str]:
    """Yield every frame that differs from the previous one, initially `shown`; then finish the run."""
    async with aclosing(drain(stream)) as batches:
        async for batch in batches:
            start = len(run.records)
            for lane, event in batch:
                run.absorb(lane, event)
            if not stream.started and (ahead := worker.ahead(stream)):
                run.phase = ("queued", f"{ahead} ahead")
            frame = run.frame(start)
            if frame != shown:
                yield frame
                shown = frame
    run.finish(reason(stream.error) if stream.error else None)


class Sockets:
    """Sends frames to all listeners of a run in `runs`; access requires only its unguessable id."""

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs
        self._listeners: dict[str, set[asyncio.Event]] = {}  # by run

    def tell(self, run: Run) -> bool:
        """Notify the listeners of `run`; return False if there are none. Call in the server's thread."""
        listeners = self._listeners.get(run.id, ())
        for changed in listeners:
            changed.set()
        return bool(listeners)

    def routes(self) -> list[WebSocketRoute]:
        """Return the route `/frames/{run}`, which sends a run's frames from its first record to its last."""
        return [WebSocketRoute("/frames/{run}", self._serve)]

    async def _serve(self, socket: WebSocket) -> None:
        run = self._runs.get(socket.path_params["run"])
        if run is None:
            return await socket.close()
        await socket.accept()
        changed, count = asyncio.Event(), 0
        listeners = self._listeners.setdefault(run.id, set())
        listeners.add(changed)
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
            listeners.discard(changed)
            if not listeners:
                self._listeners.pop(run.id, None)

    async def _until_closed(self, socket: WebSocket, changed: asyncio.Event) -> None:
        while (await socket.receive())["type"] != "websocket.disconnect":
            pass
        changed.set()

    async def _send(self, socket: WebSocket, run: Run, start: int) -> int:
        frame, end = run.frame(start), len(run.records)
        await socket.send_text(frame)
        return end
