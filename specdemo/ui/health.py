"""Is the page alive? It is if a token was produced lately, or if it produces one now.

A page that answers while its worker hangs is not alive; one that nobody has asked for anything is. Knows the service
and the server's routes; knows nothing of gradio.
"""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from specdemo.recipe import Recipe
from specdemo.ui.service import Service
from specdemo.ui.streams import reason
from specdemo.worker import Stream, WorkerBusy

LATELY_S = 600  # one look in ten minutes costs an idle machine two tokens
PATIENCE_S = 20


class Health:
    """Answers from what the service has done; when that is long ago, one run of two tokens for all who ask."""

    def __init__(
        self, service: Service, recipe: Recipe, lately_s: float = LATELY_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._service, self._recipe = service, recipe
        self._lately, self._patience = lately_s, patience_s
        self._probe: Stream | None = None

    @property
    def age_s(self) -> float | None:
        """Seconds since the last token; None before the first."""
        last = self._service.last_token
        return None if last is None else time.monotonic() - last

    @property
    def fresh(self) -> bool:
        """Whether that is recent."""
        return self.age_s is not None and self.age_s <= self._lately

    async def look(self) -> tuple[bool, str]:
        """Whether the page is alive, and how that is known."""
        if self.fresh:
            return True, f"a token was produced {self.age_s:.0f} s ago"
        try:
            if self._probe is None or self._probe.done:
                self._probe = self._service.probe(self._recipe)
        except WorkerBusy as error:
            return False, f"no token for long, and {error}"
        await asyncio.to_thread(self._probe.wait, self._patience)
        if self.fresh:
            return True, "nobody asked for anything lately, and a token was produced now"
        if self._probe.error:
            return False, reason(self._probe.error)
        return False, f"no token came within {self._patience:g} s: the device is loading or hangs"

    def routes(self) -> list[Route]:
        """`GET /health`: 200 or 503, with the reason."""

        async def answer(_: Request) -> JSONResponse:
            alive, why = await self.look()
            return JSONResponse({"alive": alive, "why": why}, 200 if alive else 503)

        return [Route("/health", answer)]
