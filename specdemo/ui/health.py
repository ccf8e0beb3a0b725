"""Health check of the page: a recent token, or a probe."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from specdemo.recipe import Recipe
from specdemo.remote.server import JobHealth, Unhealthy
from specdemo.ui.service import Service
from specdemo.ui.streams import error_sentence

LATELY_S = 600  # an idle machine decodes two tokens per ten minutes
PATIENCE_S = 20


class Health:
    """Health check of the service; its probe decodes `recipe`."""

    def __init__(self, service: Service, recipe: Recipe) -> None:
        self._service = service
        self.route = Route("/health", self.answer)
        self.jobs = JobHealth(service.worker, partial(service.probe, recipe), PATIENCE_S, service.token_age_s, LATELY_S)

    async def answer(self, _: Request) -> JSONResponse:
        """Respond to `GET /health` with 200 or 503, the reason and the passes by texts."""
        alive = True
        try:
            why = await asyncio.to_thread(self.jobs.check)
        except Unhealthy as error:
            alive, why = False, str(error) if error.__cause__ is None else error_sentence(error.__cause__)
        passes = {str(texts): count for texts, count in sorted(self._service.worker.texts_per_pass.items())}
        return JSONResponse({"alive": alive, "why": why, "texts_per_pass": passes}, 200 if alive else 503)
