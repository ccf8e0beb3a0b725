"""Frames of runs, over a WebSocket or on request."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from contextlib import aclosing, suppress
from functools import partial
from traceback import format_tb
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from specdemo.core.errors import FULL_DISK, UserError, write_error
from specdemo.core.events import Event
from specdemo.ui.frames import Run
from specdemo.ui.method_names import with_method_names
from specdemo.ui.run_store import RunStore
from specdemo.ui.visitor_sessions import address_of
from specdemo.worker import Stream, WorkerBusy, read_batches

FRAME_S = 1 / 12  # shortest time between two frames
GRACE_S = 20.0  # a run without followers is stopped after this time
LONGEST_REASON = 600  # characters; error messages can quote arbitrary input
FRAMES = "/frames/{run}"
SESSIONS = "/sessions"
TRACES, TRACE = "/traces", "/traces/{run}/{lane}"
RECORDINGS = "/recordings"
LaneEvents = Stream[tuple[str, Event]]
log = logging.getLogger(__name__)
T = TypeVar("T")


async def read_result(stream: Stream[Any], kind: type[T]) -> T:
    """Return the first item of this type. Raises the error of the job."""
    async with aclosing(read_batches(stream, FRAME_S)) as batches:
        async for batch in batches:
            for item in batch:
                if isinstance(item, kind):
                    return item
    raise stream.error or RuntimeError("the worker returned no result")


def error_sentence(error: BaseException) -> str:
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


async def advance(run: Run, stream: LaneEvents) -> None:
    """Advance `run` to its end and notify its followers. Call in the server's thread."""
    _stop_if_abandoned(run)
    try:
        async with aclosing(read_batches(stream, FRAME_S)) as batches:
            async for batch in batches:
                phase = run.phase
                for lane, event in batch:
                    run.add_event(lane, event)
                if not stream.started and (ahead := stream.worker.ahead(stream)):
                    run.phase = ("queued", f"{ahead} ahead")
                if batch or run.phase != phase:
                    run.notify()
        await asyncio.to_thread(run.finish, error_sentence(stream.error) if stream.error else None)
    except Exception as error:
        run.finish(error_sentence(error))
    run.notify()


def _stop_if_abandoned(run: Run) -> None:
    if run.over:
        return
    if run.followers:
        run.last_seen = time.monotonic()
    remaining = run.last_seen + GRACE_S - time.monotonic()
    if remaining <= 0:
        run.stop()
    else:
        asyncio.get_running_loop().call_later(remaining, _stop_if_abandoned, run)


def run_routes(runs: RunStore) -> list[BaseRoute]:
    """Return the routes of runs and of their visitors.

    `/frames/{run}` sends frames from record `from` on over a WebSocket, or one with GET. POST stops the run; a closed
    WebSocket does not, since the page may resume. Access requires the unguessable id.
    """
    return [
        WebSocketRoute(FRAMES, partial(_follow, runs)),
        Route(FRAMES, partial(_frame, runs), methods=["GET"]),
        Route(FRAMES, partial(_stop, runs), methods=["POST"]),
        Route(TRACES, partial(_open_trace, runs), methods=["POST"]),
        Route(RECORDINGS, partial(_open_recording, runs), methods=["POST"]),
        Route(TRACE, partial(_trace, runs)),
        Route(SESSIONS, partial(_end_session, runs), methods=["POST"]),
    ]


async def _open_trace(runs: RunStore, request: Request) -> Response:
    text = (await request.body()).decode("utf-8-sig", "replace")
    frame = await asyncio.to_thread(runs.import_trace, text, address_of(request))
    return Response(frame, media_type="application/json")


async def _open_recording(runs: RunStore, request: Request) -> Response:
    name = (await request.json()).get("name")
    frame = await asyncio.to_thread(runs.recorded, name, address_of(request))
    return Response(frame, media_type="application/json")


async def _trace(runs: RunStore, request: Request) -> Response:
    """Send the trace of a lane or of all."""
    run, lane = runs.get(request.path_params["run"]), request.path_params["lane"]
    names = run.plan if run is not None and lane == "all" else [lane]
    text = "".join(run.trace(name) or "" for name in names) if run is not None else ""
    return Response(text, 200 if text else 404, media_type="application/x-ndjson")


async def _end_session(runs: RunStore, request: Request) -> Response:
    """End the session of a closed page; Gradio's heartbeat would occupy a connection."""
    runs.visitors.end_session(str((await request.json()).get("session_hash", "")))
    return Response(status_code=204)


async def _stop(runs: RunStore, request: Request) -> Response:
    run = runs.get(request.path_params["run"])
    if run is not None:
        run.stop()
    return Response(status_code=404 if run is None else 204)


async def _frame(runs: RunStore, request: Request) -> Response:
    run = runs.get(request.path_params["run"])
    if run is None:
        return JSONResponse({"detail": "the server no longer stores this run"}, 404)
    run.last_seen = time.monotonic()
    headers = {"Cache-Control": "no-store"}
    return Response(run.frame(_start(request)), media_type="application/json", headers=headers)


async def _follow(runs: RunStore, socket: WebSocket) -> None:
    run = runs.get(socket.path_params["run"])
    if run is None:
        return await socket.close()
    await socket.accept()
    start, changed = _start(socket), asyncio.Event()
    run.followers.add(changed)
    closed = asyncio.ensure_future(_until_closed(socket, changed))
    try:
        with suppress(WebSocketDisconnect):
            while not closed.done():
                is_last, end = run.over, len(run.records)  # read first: a later change is sent next
                await socket.send_text(run.frame(start))
                if is_last:
                    return await socket.close()
                start = end
                await changed.wait()
                changed.clear()
    finally:
        closed.cancel()
        run.followers.discard(changed)
        run.last_seen = time.monotonic()


async def _until_closed(socket: WebSocket, changed: asyncio.Event) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
    changed.set()


def _start(connection: Request | WebSocket) -> int:
    """Return the first record to send."""
    text = connection.query_params.get("from", "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0
