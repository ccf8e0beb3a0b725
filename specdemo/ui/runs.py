"""Runs over HTTP: start, frames over a WebSocket or on request, end, and traces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any, Literal

import gradio as gr
from gradio.context import LocalContext
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from specdemo.core.errors import UserError
from specdemo.drafters import METHODS
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.lane import BASELINE, EXTRA, SHORT_PAIRS, SPEC, alternating, lanes_of, name_lanes
from specdemo.ui.limits import address_of
from specdemo.ui.service import FRAME_S, LaneEvents, Service, error_sentence
from specdemo.ui.settings import Settings, complete_settings, recipe_of, stored_lanes
from specdemo.worker import WorkerBusy, read_batches

REPEATS = 5
GRACE_S = 20.0  # a run without followers is stopped after this time
RUNS = "/runs"
FRAMES = "/frames/{run}"
SESSIONS = "/sessions"
TRACES, TRACE = "/traces", "/traces/{run}/{lane}"
RECORDINGS = "/recordings"


class RunRequest(BaseModel, extra="forbid"):
    """Request of a button."""

    id: str = Field(pattern=r"^[A-Za-z0-9_-]{16,64}$")
    session_hash: str | None = None  # private name of the session
    settings: Settings  # raw
    lanes: Any = None  # settings of further lanes, as the browser stores them
    turn: Literal["new", "next", "repeat"] = "new"  # of a conversation; `repeat`: the last turn again, several times


class Runs:
    """Routes of runs and of their visitors.

    `/frames/{run}` sends frames from record `from` on over a WebSocket, or one with GET. POST stops the run; a closed
    WebSocket does not, since the page may resume. Access requires the unguessable id.
    """

    def __init__(self, service: Service, device: str, defaults: Settings) -> None:
        self._service = service
        self._device, self._defaults = device, defaults
        self.routes: list[BaseRoute] = [
            Route(RUNS, self.start, methods=["POST"]),
            WebSocketRoute(FRAMES, self._follow),
            Route(FRAMES, self._frame, methods=["GET"]),
            Route(FRAMES, self._stop, methods=["POST"]),
            Route(TRACES, self._open_trace, methods=["POST"]),
            Route(RECORDINGS, self._open_recording, methods=["POST"]),
            Route(TRACE, self._trace),
            Route(SESSIONS, self._end_session, methods=["POST"]),
        ]

    async def start(self, request: Request) -> Response:
        """Start the run of the request and respond with its first frame."""
        LocalContext.request.set(gr.Request(request))  # `spaces.GPU` looks up the quota of the visitor by it
        try:
            wanted = RunRequest.model_validate(await request.json(), strict=True)
            wanted.settings = complete_settings(wanted.settings, self._defaults)
            run = self._begin(wanted, address_of(request))
        except ValidationError:
            return JSONResponse({"detail": "a run needs its id and the settings of the page: reload the page"}, 422)
        except UserError as error:
            return JSONResponse({"detail": str(error)}, 422)
        return Response(run.frame(0), media_type="application/json")

    def _begin(self, request: RunRequest, address: str) -> Run:
        """Return a started or failed run. Raises `UserError` for a known id."""
        visitor = self._service.visitors.get_or_add(request.session_hash or "")
        try:
            lanes, others = self._lanes(request)
        except UserError as error:
            run = self._service.runs.new(request.session_hash or "", (SPEC,), address, request.id)
            run.finish(error_sentence(error))
            return run
        run = self._service.runs.new(request.session_hash or "", tuple(lanes), address, request.id)
        if others:
            run.note(f"Not compared, since target or chat template differ: {name_lanes(others)}.")
        prompt = request.settings["prompt"]
        run.pairs = REPEATS if request.turn == "repeat" else 1
        run.repeats_short = request.turn != "repeat" and self._may_repeat(lanes)
        run.history = visitor.begin_turn(prompt, request.turn)
        try:
            stream = self._service.start(
                alternating(lanes, SHORT_PAIRS if run.repeats_short else run.pairs),
                prompt,
                run.visitor,
                address,
                run.history,
                warm_up=len(lanes) > 1,
                repeated_from=len(lanes) if run.repeats_short else None,
            )
        except (UserError, WorkerBusy) as error:
            run.finish(error_sentence(error))
            return run
        run.stop = stream.stop
        run.task = asyncio.create_task(advance(run, stream))
        run.task.add_done_callback(lambda _: visitor.remember(prompt, run))
        return run

    def _lanes(self, request: RunRequest) -> tuple[dict[str, Recipe], list[Recipe]]:
        """Return the lanes of a request and the stored recipes that cannot be compared. Raises `UserError`."""
        recipe = recipe_of(request.settings, self._device)
        if request.turn == "repeat":
            if SPEC not in (lanes := lanes_of(recipe, compare=True)):
                raise UserError(f"a comparison with method ar needs another method than ar: {', '.join(METHODS)}")
            return lanes, []
        stored = [lane for _, lane in stored_lanes(request.lanes, self._defaults, self._device, len(EXTRA))]
        # The same prompt and target, in any form.
        comparable = [lane for lane in stored if lane.models[0] == recipe.models[0] and lane.chat == recipe.chat]
        extra = [*([recipe] if recipe.external else []), *comparable]
        lanes = lanes_of(recipe, request.settings["compare"], extra[: len(EXTRA)])
        return lanes, [lane for lane in stored if lane not in comparable]

    def _may_repeat(self, lanes: Mapping[str, Recipe]) -> bool:
        """Return True for local comparisons without memory of earlier texts."""
        own = self._service.permanent and not self._service.limits.public
        learning = any(recipe.ngram_keep or recipe.external for recipe in lanes.values())
        return own and BASELINE in lanes and len(lanes) > 1 and not learning

    async def _open_trace(self, request: Request) -> Response:
        text = (await request.body()).decode("utf-8-sig", "replace")
        frame = await asyncio.to_thread(self._service.runs.import_trace, text, address_of(request))
        return Response(frame, media_type="application/json")

    async def _open_recording(self, request: Request) -> Response:
        name = (await request.json()).get("name")
        frame = await asyncio.to_thread(self._service.runs.recorded, name, address_of(request))
        return Response(frame, media_type="application/json")

    async def _trace(self, request: Request) -> Response:
        """Send the trace of a lane or of all."""
        run, lane = self._service.runs.get(request.path_params["run"]), request.path_params["lane"]
        names = run.plan if run is not None and lane == "all" else [lane]
        text = "".join(run.trace(name) or "" for name in names) if run is not None else ""
        return Response(text, 200 if text else 404, media_type="application/x-ndjson")

    async def _end_session(self, request: Request) -> Response:
        """End the session of a closed page; Gradio's heartbeat would occupy a connection."""
        self._service.visitors.end_session(str((await request.json()).get("session_hash", "")))
        return Response(status_code=204)

    async def _stop(self, request: Request) -> Response:
        run = self._service.runs.get(request.path_params["run"])
        if run is not None:
            run.stop()
        return Response(status_code=404 if run is None else 204)

    async def _frame(self, request: Request) -> Response:
        run = self._service.runs.get(request.path_params["run"])
        if run is None:
            return JSONResponse({"detail": "the server no longer stores this run"}, 404)
        run.last_seen = time.monotonic()
        headers = {"Cache-Control": "no-store"}
        return Response(run.frame(_start(request)), media_type="application/json", headers=headers)

    async def _follow(self, socket: WebSocket) -> None:
        run = self._service.runs.get(socket.path_params["run"])
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


async def _until_closed(socket: WebSocket, changed: asyncio.Event) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
    changed.set()


def _start(connection: Request | WebSocket) -> int:
    """Return the first record to send."""
    text = connection.query_params.get("from", "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0
