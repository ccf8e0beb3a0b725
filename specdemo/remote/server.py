"""HTTP service: authentication, limits, job queue."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from specdemo.core.errors import UserError
from specdemo.remote.access import RouteInfo, is_foreign, is_known_host
from specdemo.remote.contexts import Contexts, StaleRequest, UnknownContext
from specdemo.remote.protocol import (
    CODECS,
    DeleteResponse,
    ErrorResponse,
    MessageT,
    NetworkMessage,
    ServiceInfo,
    StreamRequest,
    VerifyRequest,
    VerifyResponse,
)
from specdemo.worker import Worker, WorkerBusy

_NO_PUBLIC_PAGES: dict[str, Any] = dict.fromkeys(("docs_url", "redoc_url", "openapi_url"))
_BODY_TIMEOUT_S = 10.0
_WRONG_TOKENS = (1.0, 20)  # per second and address, and in a burst
_VERIFY_LIMITS = "token, rate, body, queue, 10 s for the body, at most 256 drafted and 131,072 text tokens"
SERVICE_ROUTES = (
    RouteInfo("GET", "/v1/target", "description of the target", "token, rate"),
    RouteInfo("POST", "/v1/rounds", "verification of a draft", f"{_VERIFY_LIMITS}; contexts by number, bytes and age"),
    RouteInfo("POST", "/v1/texts", "autoregressive text as a stream", f"{_VERIFY_LIMITS}; length of the context"),
    RouteInfo("DELETE", "/v1/contexts/{ctx_id}", "deletion of a context of the client", "token, rate, queue"),
    RouteInfo("GET", "/docs", "documentation of the messages", "token, rate"),
    RouteInfo("GET", "/openapi.json", "schema of the messages", "token, rate"),
)


@dataclass(frozen=True)
class ServiceLimits:
    """Limits per request and per client address."""

    body_bytes: int = 4 << 20
    requests_per_second: float = 0.0  # 0: unlimited
    burst: int = 50


class RateLimiter:
    """Token bucket per address, refilled at `rate` per second."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._buckets: dict[str, tuple[float, float]] = {}  # remaining requests, time

    def allow(self, address: str, cost: int = 1) -> bool:
        if not self._rate:
            return True
        now = self._clock()
        if len(self._buckets) > 4096:
            self._buckets = {address: b for address, b in self._buckets.items() if self._refilled(b, now) < self._burst}
        left = self._refilled(self._buckets.get(address, (float(self._burst), now)), now)
        self._buckets[address] = (left - cost * (left >= 1), now)
        return left >= 1

    def _refilled(self, bucket: tuple[float, float], now: float) -> float:
        left, updated = bucket
        return min(self._burst, left + (now - updated) * self._rate)


class ServiceError(Exception):
    def __init__(self, status: int, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.problem = status, ErrorResponse(error=sentence, code=code)


# --- application -------------------------------------------------------------------------------------------------


def create_app(
    info: ServiceInfo,
    contexts: Contexts,
    worker: Worker,
    *,
    token: str | None = None,
    limits: ServiceLimits | None = None,
    local: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """Create the application. `local`: without a token, refuse names of other hosts."""
    limits = limits or ServiceLimits()
    app = FastAPI(
        title="specdemo cloud",
        version="1",
        description="Verifies drafts of token ids with the target model (docs/edge-cloud.md).",
        **_NO_PUBLIC_PAGES,
    )
    app.state.worker = worker
    problems = {status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 408, 409, 413, 415, 422, 429)}
    common: dict[str, Any] = {"dependencies": [Depends(_admission(token, limits, local, clock))], "responses": problems}

    @app.get("/v1/target", response_model=ServiceInfo, **common)
    async def target(request: Request) -> Response:
        """Describe the target model."""
        return _message(request, info)

    @app.post("/v1/rounds", response_model=VerifyResponse, openapi_extra=_body(VerifyRequest), **common)
    async def rounds(request: Request) -> Response:
        """Verify a draft."""
        message = await _read(request, VerifyRequest, limits.body_bytes)
        return _message(request, await run_queued(worker, request, lambda: contexts.verify(message, _address(request))))

    @app.post("/v1/texts", response_class=StreamingResponse, openapi_extra=_body(StreamRequest), **common)
    async def texts(request: Request) -> Response:
        """Decode autoregressively: a token id per line, then `end` or `error` with the cause."""
        message = await _read(request, StreamRequest, limits.body_bytes)
        tokens = stream_queued(worker, lambda: contexts.stream(message))
        first = await _first(request, tokens)  # earlier errors get a status code
        return StreamingResponse(_lines(first, tokens), media_type="text/plain")

    @app.delete("/v1/contexts/{ctx_id}", response_model=DeleteResponse, **common)
    async def forget(request: Request, ctx_id: str) -> Response:
        """Delete a context."""
        deleted = await run_queued(worker, request, lambda: contexts.delete(ctx_id, _address(request)))
        return _message(request, DeleteResponse(deleted=deleted))

    _add_error_handlers(app)
    _add_documentation(app, common["dependencies"])
    return app


def _add_error_handlers(app: FastAPI) -> None:
    app.exception_handler(ServiceError)(lambda request, error: _problem(request, error.status, error.problem))
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_invalid_request)


def _add_documentation(app: FastAPI, dependencies: list[Any]) -> None:
    hidden: dict[str, Any] = {"dependencies": dependencies, "include_in_schema": False}

    @app.get("/openapi.json", **hidden)
    async def schema() -> Response:
        return JSONResponse(app.openapi())

    @app.get("/docs", **hidden)
    async def docs() -> Response:
        return get_swagger_ui_html(openapi_url="openapi.json", title=app.title)

    app.openapi = partial(_openapi, app)  # type: ignore[method-assign]  # documented by FastAPI


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _admission(
    token: str | None, limits: ServiceLimits, local: bool, clock: Callable[[], float]
) -> Callable[..., None]:
    rates = RateLimiter(limits.requests_per_second, limits.burst, clock)
    failures = RateLimiter(*_WRONG_TOKENS, clock)
    bearer = HTTPBearer(auto_error=False)

    def admit(request: Request, sent: HTTPAuthorizationCredentials | None = Depends(bearer)) -> None:  # noqa: B008
        if local and token is None and not is_known_host(request.headers.get("host", ""), ()):
            raise ServiceError(403, "host", "this service serves its own machine: use its address, or localhost")
        if request.method not in ("GET", "HEAD") and is_foreign(request.headers):
            raise ServiceError(403, "origin", "pages of other sites cannot use this service: send no Origin")
        address = _address(request)
        if token is not None and not failures.allow(address, 0):
            raise ServiceError(429, "busy", "too many wrong tokens from this address: try again in a few seconds")
        if token is not None and not (sent and secrets.compare_digest(sent.credentials.encode(), token.encode())):
            failures.allow(address)
            raise ServiceError(
                401, "unauthorised", "the bearer token is missing or wrong: set SPECDEMO_TOKEN to the service's token"
            )
        if not rates.allow(address):
            raise ServiceError(429, "busy", "too many requests from this address: reduce the request rate")

    return admit


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = ErrorResponse(error=f"{error.detail}: see /docs for the endpoints", code="http")
    return _problem(request, error.status_code, problem, dict(error.headers or {}))


def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _problem(request, 422, ErrorResponse(error=str(error.errors()[0]["msg"]), code="invalid"))


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, bodies = models_json_schema(
            [(VerifyRequest, "validation"), (StreamRequest, "validation")],
            ref_template="#/components/schemas/{model}",
        )
        schema["components"]["schemas"].update(bodies["$defs"])
        for operation in (operation for path in schema["paths"].values() for operation in path.values()):
            for response in operation["responses"].values():
                if (content := response.get("content", {})) and "application/json" in content:
                    content.update(dict.fromkeys(CODECS, content["application/json"]))
        app.openapi_schema = schema
    return app.openapi_schema


def _body(kind: type[NetworkMessage]) -> dict[str, Any]:
    schema = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {"requestBody": {"required": True, "content": dict.fromkeys(CODECS, schema)}}


# --- messages ----------------------------------------------------------------------------------------------------


def _content_type(request: Request) -> str:
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return sent or request.headers.get("accept", "").partition(",")[0].strip().lower()


def _message(request: Request, message: NetworkMessage, status: int = 200) -> Response:
    kind = _content_type(request)
    kind = kind if kind in CODECS else "application/json"
    return Response(CODECS[kind].dump(message), status, media_type=kind)


def _problem(request: Request, status: int, problem: ErrorResponse, headers: dict[str, str] | None = None) -> Response:
    response = _message(request, problem, status)
    response.headers.update(headers or {})
    if status == 429:
        response.headers["retry-after"] = "1"
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _read(request: Request, kind: type[MessageT], max_bytes: int) -> MessageT:
    content_type = _content_type(request) if "content-type" in request.headers else ""
    if content_type not in CODECS:
        raise ServiceError(415, "type", f"content type {content_type!r} is unsupported: use {' or '.join(CODECS)}")
    body = bytearray()

    async def receive() -> None:
        async for chunk in request.stream():
            body.extend(chunk)
            if len(body) > max_bytes:
                raise ServiceError(413, "too_large", f"the body is longer than {max_bytes:,} bytes: split the request")

    try:
        await asyncio.wait_for(receive(), _BODY_TIMEOUT_S)
    except TimeoutError:
        raise ServiceError(
            408, "slow", f"the body did not arrive within {_BODY_TIMEOUT_S:g} seconds: send it again"
        ) from None
    try:
        return CODECS[content_type].load(kind, bytes(body))
    except UserError as error:
        raise ServiceError(422, "invalid", str(error)) from error


async def _first(request: Request, tokens: AsyncGenerator[int, None]) -> int:
    try:
        token: int = await _while_connected(request, anext(tokens))
        return token
    except BaseException:
        await tokens.aclose()
        raise


async def _lines(first: int, tokens: AsyncGenerator[int, None]) -> AsyncIterator[bytes]:
    async with aclosing(tokens):
        yield f"{first}\n".encode()
        try:
            async for token in tokens:
                yield f"{token}\n".encode()
        except ServiceError as error:  # too late for a status code
            if error.status != 503:  # cut off: the client will resume
                yield f"error {error}\n".encode()
            return
        yield b"end\n"


# --- job queue ---------------------------------------------------------------------------------------------------


def _service_error(error: BaseException) -> BaseException:
    if isinstance(error, UnknownContext):
        return ServiceError(404, "unknown_context", str(error))
    if isinstance(error, StaleRequest):
        return ServiceError(409, "stale", str(error))
    if isinstance(error, UserError):
        return ServiceError(422, "invalid", str(error))
    return error if isinstance(error, Exception) else RuntimeError(f"the worker failed: {error!r}")


async def stream_queued(worker: Worker, job: Callable[[], Iterator[Any]]) -> AsyncGenerator[Any, None]:
    """Yield the items of a job; closing the iterator stops it."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(changed.set)

    try:
        stream = worker.submit(job, notify)
    except WorkerBusy as error:
        raise ServiceError(429, "busy", str(error)) from error
    except RuntimeError as error:
        raise _stopping() from error
    sent = 0
    try:
        while True:
            await changed.wait()
            changed.clear()
            done = stream.done  # before the items
            while sent < len(stream.items):
                yield stream.items[sent]
                sent += 1
            if done:
                break
        if stream.error is not None:
            raise _service_error(stream.error)
        if stream.stopping:
            raise _stopping()
    finally:
        stream.stop()


def _stopping() -> ServiceError:
    return ServiceError(503, "busy", "the service is shutting down: send the request again later")


async def run_queued(worker: Worker, request: Request, call: Callable[[], Any]) -> Any:
    """Run `call()` in the worker's thread; cancel it if the client disconnects before."""
    async with aclosing(stream_queued(worker, lambda: iter((call(),)))) as results:
        return await _while_connected(request, anext(results))


async def _while_connected(request: Request, awaited: Awaitable[Any]) -> Any:
    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result, disconnect = asyncio.ensure_future(awaited), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({result, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ServiceError(400, "gone", "the client disconnected")
        return result.result()
    finally:
        for task in (result, disconnect):
            task.cancel()
        await asyncio.gather(result, disconnect, return_exceptions=True)
