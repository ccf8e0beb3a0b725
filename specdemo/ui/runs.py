"""Start of runs: a request becomes lanes, a job and a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

import gradio as gr
from gradio.context import LocalContext
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from specdemo.core.errors import UserError
from specdemo.drafters import METHODS
from specdemo.recipe import Recipe
from specdemo.ui.frames import Run
from specdemo.ui.lane import BASELINE, EXTRA, SHORT_PAIRS, SPEC, alternating, comparable_lanes, lanes_of, name_lanes
from specdemo.ui.service import Service
from specdemo.ui.settings import Settings, complete_settings, recipe_of, stored_lanes
from specdemo.ui.streams import advance, error_sentence
from specdemo.ui.visitor_sessions import address_of
from specdemo.worker import WorkerBusy

REPEATS = 5
RUNS = "/runs"


class RunRequest(BaseModel, extra="forbid"):
    """Request of a button."""

    id: str = Field(pattern=r"^[A-Za-z0-9_-]{16,64}$")
    session_hash: str | None = None  # private name of the session
    settings: Settings  # raw
    lanes: Any = None  # settings of further lanes, as the browser stores them
    turn: Literal["new", "next", "repeat"] = "new"  # of a conversation; `repeat`: the last turn again, several times


class Runs:
    """Start runs of the page."""

    def __init__(self, service: Service, device: str, defaults: Settings) -> None:
        self._service = service
        self._device, self._defaults = device, defaults
        self.route = Route(RUNS, self.start, methods=["POST"])

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
        comparable = comparable_lanes(stored, recipe)
        extra = [*([recipe] if recipe.external else []), *comparable]
        lanes = lanes_of(recipe, request.settings["compare"], extra[: len(EXTRA)])
        return lanes, [lane for lane in stored if lane not in comparable]

    def _may_repeat(self, lanes: Mapping[str, Recipe]) -> bool:
        """Return True for local comparisons without memory of earlier texts."""
        own = self._service.permanent and not self._service.limits.public
        learning = any(recipe.ngram_keep or recipe.external for recipe in lanes.values())
        return own and BASELINE in lanes and len(lanes) > 1 and not learning
