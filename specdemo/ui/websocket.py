"""A run's frames over a socket of its own, for a browser that is there to draw them.

Through gradio's events a frame keeps Python's lock from the thread that decodes for some four milliseconds, over a
socket for a tenth of that. gradio's event goes on beside it: it begins and ends the run, and gives the frames where no
socket comes through to the page. Knows runs and the server's routes; knows nothing of gradio.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from specdemo.ui.frames import Run
from specdemo.ui.run_store import RunStore


class Sockets:
    """Whoever listens to a run of `runs`, whose unguessable id is all that it takes."""

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs
        self._listening: dict[str, set[asyncio.Event]] = {}  # by run; each is set when there is news for that listener

    def tell(self, run: Run) -> bool:
        """There is news of this run; whether anybody hears of it here. To be called in the server's own thread."""
        listening = self._listening.get(run.id, ())
        for news in listening:
            news.set()
        return bool(listening)

    def routes(self) -> list[WebSocketRoute]:
        """`/frames/{run}`: every frame of a run that is going on, from its first record to its last."""
        return [WebSocketRoute("/frames/{run}", self._serve)]

    async def _serve(self, socket: WebSocket) -> None:
        run = self._runs.get(socket.path_params["run"])
        if run is None:
            return await socket.close()
        await socket.accept()
        news, at = asyncio.Event(), 0
        listening = self._listening.setdefault(run.id, set())
        listening.add(news)
        gone = asyncio.ensure_future(self._until_gone(socket, news))
        try:
            with suppress(WebSocketDisconnect):
                while not (run.over or gone.done()):
                    at = await self._send(socket, run, at)
                    await news.wait()
                    news.clear()
                if not gone.done():
                    await self._send(socket, run, at)
                    await socket.close()
        finally:
            gone.cancel()
            listening.discard(news)
            if not listening:
                self._listening.pop(run.id, None)

    async def _until_gone(self, socket: WebSocket, news: asyncio.Event) -> None:
        """Wait for the browser to hang up, whatever else it has to say; who then listens no more is told so."""
        while (await socket.receive())["type"] != "websocket.disconnect":
            pass
        news.set()

    async def _send(self, socket: WebSocket, run: Run, at: int) -> int:
        """Whatever there is from record `at` on; how many records have been sent by then."""
        frame, end = run.frame(at), len(run.records)
        await socket.send_text(frame)
        return end
