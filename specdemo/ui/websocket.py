"""Frames of a run over a WebSocket.

Sending a frame through gradio's events blocks the decoding thread (GIL) for about 4 ms, through a socket for 0.4 ms.
The gradio event still starts and ends the run, and sends the frames where a socket cannot be opened.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from specdemo.ui.frames import Run
from specdemo.ui.run_store import RunStore


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
