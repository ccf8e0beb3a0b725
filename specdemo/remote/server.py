"""The cloud's service over HTTP: who may ask, how much, and in what turn. What is answered is `contexts.py`'s.

Its turn at the device is `turns.py`'s. Knows HTTP and messages; knows no models.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from specdemo.core.errors import UserError
from specdemo.remote.contexts import Contexts, StaleRequest, UnknownContext
from specdemo.remote.protocol import (
    ENCODINGS,
    DeleteResponse,
    ErrorResponse,
    ServiceInfo,
    StreamRequest,
    VerifyRequest,
    VerifyResponse,
    WireMessage,
)
from specdemo.worker import Worker, WorkerBusy

PATIENCE_S = 10.0  # for a body to arrive
M = TypeVar("M", bound=WireMessage)


@dataclass(frozen=True)
class ServiceLimits:
    """What one request and one peer may ask for."""

    body_bytes: int = 4 << 20
    rounds_per_second: float = 0.0  # of one address; 0: as many as it likes
    burst: int = 50


class RateLimiter:
    """A bucket of `burst` requests per address, filled at `rate` a second."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left: dict[str, tuple[float, float]] = {}  # by address: how many, and when that was

    def allow(self, address: str) -> bool:
        """Take one, if there is one."""
        if not self._rate:
            return True
        now = self._clock()
        if len(self._left) > 4096:  # full buckets say nothing
            self._left = {a: (n, t) for a, (n, t) in self._left.items() if n + (now - t) * self._rate < self._burst}
        left, then = self._left.get(address, (float(self._burst), now))
        left = min(self._burst, left + (now - then) * self._rate)
        self._left[address] = (left - (left >= 1), now)
        return left >= 1


def service(
    about: ServiceInfo,
    contexts: Contexts,
    worker: Worker,
    *,
    token: str | None = None,
    limits: ServiceLimits | None = None,
) -> FastAPI:
    """The application. With `token`, whoever does not send it as a bearer gets 401."""
    limits = limits or ServiceLimits()
    rates = RateLimiter(limits.rounds_per_second, limits.burst)
    bearer = HTTPBearer(auto_error=False)
    app = FastAPI(
        title="specdemo cloud",
        version="1",
        description="Judges drafts of token ids with the target's law (docs/edge-cloud.md).",
    )

    def admitted(request: Request, sent: HTTPAuthorizationCredentials | None = Depends(bearer)) -> None:  # noqa: B008
        if token is not None and not (sent and secrets.compare_digest(sent.credentials.encode(), token.encode())):
            raise ServiceError(
                401, "unauthorised", "the bearer token is missing or wrong: send the one the service was given"
            )
        if not rates.allow(request.client.host if request.client else ""):
            raise ServiceError(429, "busy", "too many requests from this address: send them more slowly")

    @app.exception_handler(ServiceError)
    def trouble(request: Request, error: ServiceError) -> Response:
        return _problem(request, error.status, error.problem)

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        sentence = f"{error.detail}: see /docs for what there is"
        return _problem(
            request, error.status_code, ErrorResponse(error=sentence, code="http"), dict(error.headers or {})
        )

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        return _problem(request, 422, ErrorResponse(error=str(error.errors()[0]["msg"]), code="invalid"))

    problems = {status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 409, 413, 415, 422, 429)}
    common: dict[str, Any] = {"dependencies": [Depends(admitted)], "responses": problems}

    @app.get("/v1/target", response_model=ServiceInfo, **common)
    async def target(request: Request) -> Response:
        """The model that judges."""
        return _message(request, about)

    @app.post("/v1/rounds", response_model=VerifyResponse, openapi_extra=_body(VerifyRequest), **common)
    async def rounds(request: Request) -> Response:
        """Judge a draft."""
        round = await _read(request, VerifyRequest, limits.body_bytes)
        return _message(request, await run_queued(worker, request, lambda: contexts.answer(round)))

    @app.post("/v1/texts", response_class=StreamingResponse, openapi_extra=_body(StreamRequest), **common)
    async def texts(request: Request) -> Response:
        """Decode plainly: one token id a line, as they are made; `end` or `error` and why after the last one."""
        text = await _read(request, StreamRequest, limits.body_bytes)
        tokens = stream_queued(worker, lambda: contexts.continued(text))
        first = await anext(tokens)  # what is refused is refused before there is a status line
        return StreamingResponse(_lines(first, tokens), media_type="text/plain")

    @app.delete("/v1/contexts/{ctx_id}", response_model=DeleteResponse, **common)
    async def forget(request: Request, ctx_id: str) -> Response:
        """Forget a context that is not needed any more."""
        forgotten = await run_queued(worker, request, lambda: contexts.forget(ctx_id))
        return _message(request, DeleteResponse(forgotten=forgotten))

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            words = {"title": app.title, "version": app.version, "description": app.description}
            described = get_openapi(**words, routes=app.routes)
            _, sent = models_json_schema(
                [(VerifyRequest, "validation"), (StreamRequest, "validation")],
                ref_template="#/components/schemas/{model}",
            )
            described["components"]["schemas"].update(sent["$defs"])
            for operation in (one for path in described["paths"].values() for one in path.values()):
                for answer in operation["responses"].values():
                    if (content := answer.get("content", {})) and "application/json" in content:
                        content.update(dict.fromkeys(ENCODINGS, content["application/json"]))
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # fastapi's own way to describe bodies it does not parse
    return app


def _body(kind: type[WireMessage]) -> dict[str, Any]:
    schema = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {"requestBody": {"required": True, "content": dict.fromkeys(ENCODINGS, schema)}}


def _type(request: Request) -> str:
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return sent or request.headers.get("accept", "").partition(",")[0].strip().lower()


def _message(request: Request, message: WireMessage, status: int = 200) -> Response:
    """In the encoding that the request came in; JSON for whoever sent nothing."""
    kind = _type(request)
    kind = kind if kind in ENCODINGS else "application/json"
    return Response(ENCODINGS[kind].dump(message), status, media_type=kind)


def _problem(request: Request, status: int, problem: ErrorResponse, headers: dict[str, str] | None = None) -> Response:
    response = _message(request, problem, status)
    response.headers.update(headers or {})
    if status == 429:
        response.headers["retry-after"] = "1"
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _read(request: Request, kind: type[M], most: int) -> M:
    """The message in a request's body; `Trouble` for one that is too long, too slow or none at all."""
    sent = _type(request)
    if sent not in ENCODINGS:
        raise ServiceError(415, "type", f"content type {sent!r} is not understood: send {' or '.join(ENCODINGS)}")
    body = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            body.extend(chunk)
            if len(body) > most:
                raise ServiceError(413, "too_large", f"the body is longer than {most:,} bytes: send less at a time")

    try:
        await asyncio.wait_for(read(), PATIENCE_S)
    except asyncio.TimeoutError:
        raise ServiceError(
            408, "slow", f"the body did not arrive within {PATIENCE_S:g} seconds: send it again"
        ) from None
    try:
        return ENCODINGS[sent].load(kind, bytes(body))
    except UserError as refusal:
        raise ServiceError(422, "invalid", str(refusal)) from refusal


async def _lines(first: int, tokens: AsyncIterator[int]) -> AsyncIterator[bytes]:
    """One a line; without one of the last lines the text was cut off."""
    yield f"{first}\n".encode()
    try:
        async for token in tokens:
            yield f"{token}\n".encode()
    except ServiceError as trouble:  # it is too late for a status
        yield f"error {trouble}\n".encode()
        return
    yield b"end\n"


class ServiceError(Exception):
    """A request that is answered with a `Problem`."""

    def __init__(self, status: int, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.problem = status, ErrorResponse(error=sentence, code=code)


def _translated(error: BaseException) -> BaseException:
    """What the worker raised, as an answer where it is one."""
    if isinstance(error, UnknownContext):
        return ServiceError(404, "unknown_context", str(error))
    if isinstance(error, StaleRequest):
        return ServiceError(409, "stale", str(error))
    if isinstance(error, UserError):
        return ServiceError(422, "invalid", str(error))
    return error


async def stream_queued(worker: Worker, make: Callable[[], Iterator[Any]]) -> AsyncIterator[Any]:
    """What `make()` yields in the worker's thread, as it comes. Leaving early stops it before its next step."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def tell(kind: str, value: Any = None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, (kind, value))

    def job() -> Iterator[None]:
        try:
            for item in make():
                tell("item", item)
                yield
        except Exception as error:  # whatever it is, it belongs to whoever asked
            tell("error", error)
            return
        tell("end")

    try:
        stream_queued = worker.submit(job)
    except WorkerBusy as busy:
        raise ServiceError(429, "busy", str(busy)) from busy
    try:
        while True:
            kind, value = await queue.get()
            if kind == "end":
                return
            if kind == "error":
                raise _translated(value)
            yield value
    finally:
        stream_queued.stop()


async def run_queued(worker: Worker, request: Request, call: Callable[[], Any]) -> Any:
    """The result of `call()` in the worker's thread; nothing is computed for an edge that hung up while it waited."""
    results = stream_queued(worker, lambda: iter((call(),)))

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, hung_up = asyncio.ensure_future(anext(results)), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ServiceError(400, "gone", "the request was given up")
        return answer.result()
    finally:
        for task in (answer, hung_up):
            task.cancel()
        await asyncio.gather(answer, hung_up, return_exceptions=True)
        await results.aclose()
