"""Start of runs: a request becomes lanes, a job and a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import gradio as gr
from gradio.context import LocalContext
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from specdemo.core.errors import UserError
from specdemo.drafters import METHODS
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.lane import EXTRA, SPEC, alternating, comparable_lanes, lanes_of, name_lanes, plan_of
from specdemo.ui.service import Service
from specdemo.ui.settings import Settings, recipe_of, recipe_settings, stored_recipes
from specdemo.ui.streams import LaneEvents, RunFrames, reason
from specdemo.ui.visitor_sessions import FIELD
from specdemo.worker import WorkerBusy

REPEATS = 5
RUNS = "/runs"
_KEYS = {"id", FIELD, "settings", "lanes", "turn"}
Turn = Literal["new", "next", "repeat"]  # of a conversation; `repeat`: the last turn again, several times


@dataclass(frozen=True)
class RunRequest:
    """Request of a button; settings are raw."""

    id: str
    visitor: str
    settings: Settings
    lanes: Any  # settings of further lanes, as the browser stores them
    turn: Turn

    @classmethod
    def parse(cls, value: Mapping[str, Any], defaults: Settings) -> RunRequest:
        """Parse JSON; missing settings are `defaults`. Raises `UserError`."""
        settings, turn = value.get("settings"), value.get("turn", "new")
        if value.keys() - _KEYS or turn not in ("new", "next", "repeat") or not isinstance(settings, dict):
            raise UserError("a run needs its id and the settings of the page: reload the page")
        if unknown := settings.keys() - defaults.keys():
            raise UserError(f"unknown setting {min(unknown)[:40]!r}: reload the page")
        run_id = value.get("id")
        if not isinstance(run_id, str):
            raise UserError("a run needs an id: reload the page")
        return cls(run_id, value.get(FIELD) or "", {**defaults, **settings}, value.get("lanes"), turn)

    @property
    def pairs(self) -> int:
        return REPEATS if self.turn == "repeat" else 1


class Runs:
    """Start and play runs."""

    def __init__(self, service: Service, frames: RunFrames, device: str, defaults: Settings) -> None:
        self._service, self._frames = service, frames
        self._device, self._defaults = device, defaults
        self._playing: set[asyncio.Task[None]] = set()

    def start(self, value: Mapping[str, Any], address: str) -> Run:
        """Return a started or failed run. Raises `UserError` for malformed requests."""
        request = RunRequest.parse(value, self._defaults)
        prompt = request.settings["prompt"]
        if request.turn == "repeat" and prompt == "":  # cleared after it was sent
            prompt = self._service.conversations.last_message(request.visitor)
        extra, others = self._extra_lanes(request)
        compare = request.settings["compare"] or request.turn == "repeat"
        plan = plan_of(request.settings, compare, len(extra))
        run = self._service.runs.new(request.visitor, plan, address, request.id)
        run.visitor = request.visitor
        run.pairs = request.pairs
        run.history = self._service.conversations.history(request.visitor, prompt, request.turn)
        if others:
            run.note(f"Not compared, since target or chat template differ: {name_lanes(others)}.")
        try:
            stream = self._submit(run, request, prompt, extra, address)
        except (UserError, WorkerBusy) as error:
            run.finish(reason(error))
            return run
        run.begin(stream.stop)
        playing = asyncio.create_task(self._play(run, stream, request.visitor, prompt))
        self._playing.add(playing)
        playing.add_done_callback(self._playing.discard)
        return run

    def _submit(self, run: Run, request: RunRequest, prompt: Any, extra: list[Recipe], address: str) -> LaneEvents:
        if run.pairs > 1 and SPEC not in run.plan:
            raise UserError(f"a comparison with method ar needs another method than ar: {', '.join(METHODS)}")
        recipe = recipe_of(recipe_settings(request.settings), self._device)
        lanes = lanes_of(recipe, extra, run.plan)
        jobs = alternating(lanes, run.pairs)
        warm_up = len(lanes) > 1
        return self._service.start(jobs, prompt, request.visitor, address, run.history, warm_up)

    async def _play(self, run: Run, stream: LaneEvents, visitor: str, prompt: str) -> None:
        await self._frames.play(run, stream)
        if visitor:
            self._service.conversations.remember(visitor, prompt, run)

    def _extra_lanes(self, request: RunRequest) -> tuple[list[Recipe], list[Recipe]]:
        """Return comparable recipes and others."""
        if request.turn == "repeat":
            return [], []
        try:
            recipe = recipe_of(recipe_settings(request.settings), self._device)
        except UserError:  # reported when the run is submitted
            return [], []
        stored = stored_recipes(request.lanes, self._defaults, self._device, len(EXTRA))
        comparable = comparable_lanes(stored, recipe)
        extra = [*([recipe] if recipe.external else []), *comparable][: len(EXTRA)]
        return extra, [lane for lane in stored if lane not in comparable]


def run_route(runs: Runs) -> Route:
    """Return the route that starts a run and responds with its first frame."""

    async def started(request: Request) -> Response:
        LocalContext.request.set(gr.Request(request))  # `spaces.GPU` looks up the quota of the visitor by it
        try:
            run = runs.start(await request.json(), request.client.host if request.client else "")
        except UserError as error:
            return JSONResponse({"detail": str(error)}, 422)
        return Response(run.frame(0), media_type="application/json")

    return Route(RUNS, started, methods=["POST"])
