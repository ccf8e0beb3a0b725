"""Health check of the page: a recent token, or a probe that produces one."""

from __future__ import annotations

import asyncio
import math
import time

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from specdemo.core.events import Event
from specdemo.recipe import Recipe
from specdemo.ui.service import Service
from specdemo.ui.streams import reason
from specdemo.worker import Stream, WorkerBusy

LATELY_S = 600  # an idle machine decodes two tokens per ten minutes
PATIENCE_S = 20


class Health:
    """Health check of the service. If the last token is old, a probe run is started and shared by all requests."""

    def __init__(self, service: Service, recipe: Recipe) -> None:
        self._service, self._recipe = service, recipe
        self._patience: float = PATIENCE_S
        self._probe: Stream[Event] | None = None

    async def check(self) -> tuple[bool, str]:
        if (age_s := self._token_age_s()) <= LATELY_S:
            return True, f"a token was produced {age_s:.0f} s ago"
        try:
            if self._probe is None or self._probe.done:
                self._probe = self._service.probe(self._recipe)
        except WorkerBusy as error:
            return False, f"no recent token, and {error}"
        await asyncio.to_thread(self._probe.wait, self._patience)
        if self._token_age_s() <= LATELY_S:
            return True, "the page was idle, and a probe produced a token"
        if self._probe.error:
            return False, reason(self._probe.error)
        return False, f"no token within {self._patience:g} s: the device is loading models or does not respond"

    def _token_age_s(self) -> float:
        last = self._service.last_token
        return math.inf if last is None else time.monotonic() - last

    def route(self) -> Route:
        """Return the route `GET /health`: 200 or 503, with the reason and the passes by texts."""

        async def answer(_: Request) -> JSONResponse:
            alive, why = await self.check()
            passes = {str(texts): count for texts, count in sorted(self._service.worker.texts_per_pass.items())}
            return JSONResponse({"alive": alive, "why": why, "texts_per_pass": passes}, 200 if alive else 503)

        return Route("/health", answer)
