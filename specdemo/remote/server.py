"""HTTP service: authentication, limits, job queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, closing
from functools import partial
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from specdemo.core.errors import PromptTooLong, UserError
from specdemo.remote.access import RouteInfo
from specdemo.remote.admission import (
    ServiceError,
    ServiceOptions,
    admission,
    client_gone,
    context_owner,
    read_body,
)
from specdemo.remote.contexts import ContextInUse, Contexts
from specdemo.remote.guide_requests import StaleRequest, UnknownContext
from specdemo.remote.protocol import (
    CODECS,
    DeleteResponse,
    ErrorResponse,
    MessageT,
    NetworkMessage,
    PrefillPosition,
    ReadyResponse,
    ServiceInfo,
    StreamRequest,
    Unreadable,
    VerifyRequest,
    VerifyResponse,
)
from specdemo.worker import Worker, WorkerBusy, read_batches

_APPLICATION: dict[str, Any] = {
    "title": "specdemo cloud",
    "version": "1",
    "description": "Verifies drafts of token ids with the target model (docs/edge-cloud.md).",
    **dict.fromkeys(("docs_url", "redoc_url", "openapi_url")),  # the documentation requires the token
}
_CLOSING = {"connection": "close"}  # the rest of the body is not read
ERROR_HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"www-authenticate": "Bearer"},
    408: _CLOSING,
    413: _CLOSING,
    429: {"retry-after": "1"},
}
_STATUSES = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 503)
_PROBLEMS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorResponse} for status in _STATUSES}
_SHORT_BODY = 1 << 16  # bytes
_PREFILL_S = 1.0  # part of a prefill after which an edge gets a response
_VERIFY_LIMITS = "token, rate, body, queue, at most 256 drafted and 131,072 text tokens"
SERVICE_ROUTES = (
    RouteInfo("GET", "/v1/target", "description of the target", "token, rate"),
    RouteInfo("GET", "/v1/ready", "sign of life while steps wait", "response of a few bytes"),
    RouteInfo("POST", "/v1/rounds", "verification of a draft", f"{_VERIFY_LIMITS}; contexts by number, bytes and age"),
    RouteInfo("POST", "/v1/texts", "autoregressive text as a stream", f"{_VERIFY_LIMITS}; length of the context"),
    RouteInfo("DELETE", "/v1/contexts/{ctx_id}", "deletion of a context of the client", "token, rate, queue"),
    RouteInfo("GET", "/docs", "documentation of the messages", "token, rate"),
    RouteInfo("GET", "/openapi.json", "schema of the messages", "token, rate"),
)

T = TypeVar("T")


def create_app(
    info: ServiceInfo,
    contexts: Contexts,
    worker: Worker,
    options: ServiceOptions | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    options = options or ServiceOptions()
    app = FastAPI(**_APPLICATION)
    app.exception_handler(ServiceError)(lambda request, error: _problem(request, error.status, error.problem))
    app.exception_handler(HTTPException)(_http_error)
    app.state.worker = worker
    app.state.contexts = contexts
    app.state.options = options
    app.state.admission = admission(options, clock)
    if options.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.origins, allow_methods=("GET", "POST"), allow_headers=("*",)
        )

    @app.get("/v1/ready", response_model=ReadyResponse)
    async def ready(request: Request) -> Response:
        """Respond without a token."""
        return _message(request, ReadyResponse())

    _add_routes(app, info, clock)
    return app


def _add_routes(app: FastAPI, info: ServiceInfo, clock: Callable[[], float]) -> None:
    """Add the routes for admitted clients."""
    common: dict[str, Any] = {"dependencies": [Depends(app.state.admission)], "responses": _PROBLEMS}
    worker: Worker = app.state.worker
    contexts: Contexts = app.state.contexts
    max_bytes = app.state.options.body_bytes

    @app.get("/v1/target", response_model=ServiceInfo, **common)
    async def target(request: Request) -> Response:
        """Describe the target model."""
        return _message(request, info)

    @app.post("/v1/rounds", response_model=VerifyResponse, openapi_extra=_body(VerifyRequest), **common)
    async def rounds(request: Request) -> Response:
        """Verify a draft, or respond with status 503, code `prefill`: a part of a long text is read."""
        message = await _read(request, VerifyRequest, max_bytes)
        client = context_owner(request), request.headers.get("idempotency-key", "")
        job = partial(_verified, contexts, message, client, clock)
        response = await run_queued(worker, request, job)
        return _message(request, response, headers=None if message.base else info.headers)

    @app.post("/v1/texts", response_class=StreamingResponse, openapi_extra=_body(StreamRequest), **common)
    async def texts(request: Request, progress: bool = False) -> Response:
        """Decode autoregressively: lines `read COUNT` with `progress`, token ids, `end` or `error` with the cause."""
        message = await _read(request, StreamRequest, max_bytes)
        lines = _lines(stream_queued(worker, lambda: contexts.stream(message)), progress)
        started = await started_stream(request, lines, _error_line)
        return StreamingResponse(started, media_type="text/plain", headers=info.headers)

    @app.delete("/v1/contexts/{ctx_id}", response_model=DeleteResponse, **common)
    async def forget(request: Request, ctx_id: str) -> Response:
        """Delete a context."""
        owner = context_owner(request)
        deleted = await run_queued(worker, request, lambda: iter((contexts.delete(ctx_id, owner),)))
        return _message(request, DeleteResponse(deleted=deleted))

    @app.get("/openapi.json", include_in_schema=False, **common)
    async def schema() -> Response:
        return JSONResponse(_openapi(app))

    @app.get("/docs", include_in_schema=False, **common)
    async def docs() -> Response:
        return get_swagger_ui_html(openapi_url="openapi.json", title=app.title)


def _http_error(request: Request, error: HTTPException) -> Response:
    problem = ErrorResponse(error=f"{error.detail}: see /docs for the endpoints", code="http")
    return _problem(request, error.status_code, problem, dict(error.headers or {}))


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = app.openapi()
        _, bodies = models_json_schema(
            [(VerifyRequest, "validation"), (StreamRequest, "validation")], ref_template="#/components/schemas/{model}"
        )
        schema["components"]["schemas"].update(bodies["$defs"])
        for operation in (operation for path in schema["paths"].values() for operation in path.values()):
            for response in operation["responses"].values():
                if (content := response.get("content", {})) and "application/json" in content:
                    content.update(dict.fromkeys(CODECS, content["application/json"]))
    return app.openapi()


def _body(kind: type[NetworkMessage]) -> dict[str, Any]:
    schema = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {"requestBody": {"required": True, "content": dict.fromkeys(CODECS, schema)}}


def _content_type(request: Request) -> str:
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return sent or request.headers.get("accept", "").partition(",")[0].strip().lower()


def _message(
    request: Request, message: NetworkMessage, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    kind = _content_type(request)
    kind = kind if kind in CODECS else "application/json"
    return Response(CODECS[kind].dump(message), status, headers, media_type=kind)


def _problem(request: Request, status: int, problem: ErrorResponse, headers: dict[str, str] | None = None) -> Response:
    response = _message(request, problem, status)
    response.headers.update({**(headers or {}), **ERROR_HEADERS.get(status, {})})
    return response


async def _read(request: Request, kind: type[MessageT], max_bytes: int) -> MessageT:
    content_type = _content_type(request) if "content-type" in request.headers else ""
    if content_type not in CODECS:
        raise ServiceError(415, "type", f"content type {content_type!r} is unsupported: use {' or '.join(CODECS)}")
    body = await read_body(request.receive, max_bytes)
    try:
        return await parse_body(partial(CODECS[content_type].load, kind), body)
    except UserError as error:
        code = "unreadable" if isinstance(error, Unreadable) else "invalid"
        raise ServiceError(422, code, str(error)) from error


async def parse_body(parse: Callable[[bytes], T], body: bytes) -> T:
    """Parse long bodies in a thread."""
    return parse(body) if len(body) <= _SHORT_BODY else await asyncio.to_thread(parse, body)


def _verified(
    contexts: Contexts, message: VerifyRequest, client: tuple[str, str], clock: Callable[[], float]
) -> Iterator[VerifyResponse | None]:
    end = clock() + _PREFILL_S
    with closing(contexts.verify(message, *client)) as items:
        for item in items:
            if isinstance(item, VerifyResponse):
                yield item
            elif clock() < end:
                yield None
            else:
                sentence = f"{item.count:,} tokens of the text are read: send the request again"
                raise ServiceError(503, "prefill", sentence, item.count)


async def _lines(items: AsyncGenerator[int | PrefillPosition, None], progress: bool) -> AsyncGenerator[bytes, None]:
    async with aclosing(items):
        async for item in items:
            if isinstance(item, int):
                yield f"{item}\n".encode()
            elif progress:
                yield f"read {item.count}\n".encode()
    yield b"end\n"


def _error_line(error: Exception) -> bytes:
    """Return the last line of a stream; without it, the client resumes the stream."""
    if not isinstance(error, ServiceError):
        raise error
    return b"" if error.status == 503 else f"error {error}\n".encode()


async def started_stream(
    request: Request, parts: AsyncGenerator[bytes, None], describe: Callable[[Exception], bytes]
) -> AsyncIterator[bytes]:
    """Return the parts of a response after the first has arrived: earlier errors get a status code."""
    try:
        first = await while_connected(request, anext(parts))
    except BaseException:
        await parts.aclose()
        raise

    async def started() -> AsyncIterator[bytes]:
        async with aclosing(parts):
            yield first
            try:
                async for part in parts:
                    yield part
            except Exception as error:  # too late for a status code
                yield describe(error)

    return started()


TOO_LONG = "context_length_exceeded"
_ERRORS: tuple[tuple[type[Exception], int, str], ...] = (
    (UnknownContext, 404, "unknown_context"),
    (StaleRequest, 409, "stale"),
    (ContextInUse, 503, "busy"),
    (PromptTooLong, 422, TOO_LONG),
    (UserError, 422, "invalid"),
)


def _service_error(error: BaseException) -> BaseException:
    for kind, status, code in _ERRORS:
        if isinstance(error, kind):
            return ServiceError(status, code, str(error))
    return error if isinstance(error, Exception) else RuntimeError(f"the worker failed: {error!r}")


async def stream_queued(worker: Worker, job: Callable[[], Iterator[Any]]) -> AsyncGenerator[Any, None]:
    """Yield the items of a job; closing the iterator stops it."""
    try:
        stream = worker.submit(job)
    except WorkerBusy as error:
        raise ServiceError(429, "busy", str(error)) from error
    except RuntimeError as error:
        raise _stopping() from error
    async with aclosing(read_batches(stream)) as batches:
        async for batch in batches:
            for item in batch:
                yield item
        if stream.error is not None:
            raise _service_error(stream.error)
        if stream.stopping:
            raise _stopping()


def _stopping() -> ServiceError:
    return ServiceError(503, "stopping", "the service is shutting down: send the request again later")


async def run_queued(worker: Worker, request: Request, job: Callable[[], Iterator[Any]]) -> Any:
    """Return the first item of a job that is not None; cancel it if the client disconnects before."""
    async with aclosing(stream_queued(worker, job)) as results:
        while (result := await while_connected(request, anext(results))) is None:
            pass
        return result


async def while_connected(request: Request, awaited: Awaitable[Any]) -> Any:
    """Cancel and raise `ServiceError` if the client disconnects before the result."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result, disconnect = asyncio.ensure_future(awaited), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({result, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise client_gone()
        return result.result()
    finally:
        for task in (result, disconnect):
            task.cancel()
        await asyncio.gather(result, disconnect, return_exceptions=True)
