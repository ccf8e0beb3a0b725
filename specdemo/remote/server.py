"""HTTP service of a target: routes, job queue, process and health."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from specdemo.core.errors import PromptTooLong, UserError
from specdemo.core.texts import BannedText
from specdemo.models.engines.engine import thread_initializer
from specdemo.models.hub import Hub
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel, identify
from specdemo.models.memory import has_memory_for_text
from specdemo.models.tokenizer import token_bytes
from specdemo.models.zoo import fingerprint
from specdemo.remote.access import RouteInfo
from specdemo.remote.admission import (
    ConnectionLimits,
    LimitedListener,
    ServiceError,
    ServiceOptions,
    VisitorConnections,
    admission,
    context_owner,
    limit_connections,
    read_body,
)
from specdemo.remote.contexts import ContextInUse, Contexts, StaleRequest, UnknownContext
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
    VerifyConfig,
    VerifyRequest,
    VerifyResponse,
)
from specdemo.signals import handle_signals
from specdemo.worker import Stream, Worker, WorkerBusy, read_batches

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
TOO_LONG = "context_length_exceeded"
_ERRORS: tuple[tuple[type[Exception], int, str], ...] = (
    (UnknownContext, 404, "unknown_context"),
    (StaleRequest, 409, "stale"),
    (ContextInUse, 503, "busy"),
    (PromptTooLong, 422, TOO_LONG),
    (UserError, 422, "invalid"),
)
_SHORT_BODY = 1 << 16  # bytes
_PREFILL_S = 1.0  # part of a prefill after which an edge gets a response
_KEEP_ALIVE_S = 75
_SHUTDOWN_TIMEOUT_S = 5
STALLED_S = 25.0
_PROBE = StreamRequest(tokens=[0], config=VerifyConfig(temperature=0.0), max_tokens=1)
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
    """Create the application; its routes, except the readiness route, are for admitted clients."""
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

    common: dict[str, Any] = {"dependencies": [Depends(app.state.admission)], "responses": _PROBLEMS}

    @app.get("/v1/ready", response_model=ReadyResponse)
    async def ready(request: Request) -> Response:
        """Respond without a token."""
        return _message(request, ReadyResponse())

    @app.get("/v1/target", response_model=ServiceInfo, **common)
    async def target(request: Request) -> Response:
        """Describe the target model."""
        return _message(request, info)

    @app.post("/v1/rounds", response_model=VerifyResponse, openapi_extra=_body(VerifyRequest), **common)
    async def rounds(request: Request) -> Response:
        """Verify a draft, or respond with status 503, code `prefill`: a part of a long text is read."""
        message = await _read(request, VerifyRequest, options.body_bytes)
        owner, retry_key = context_owner(request), request.headers.get("idempotency-key", "")
        job = partial(_verified, contexts, message, owner, retry_key, clock)
        response = await run_queued(worker, request, job)
        return _message(request, response, headers=None if message.base else info.headers)

    @app.post("/v1/texts", response_class=StreamingResponse, openapi_extra=_body(StreamRequest), **common)
    async def texts(request: Request, progress: bool = False) -> Response:
        """Decode autoregressively: lines `read COUNT` with `progress`, token ids, `end` or `error` with the cause."""
        message = await _read(request, StreamRequest, options.body_bytes)
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

    return app


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


def _message(
    request: Request, message: NetworkMessage, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Encode a message like the request, or as its first accepted type; otherwise as JSON."""
    kind = content_type(request) or request.headers.get("accept", "").partition(",")[0].strip().lower()
    kind = kind if kind in CODECS else "application/json"
    return Response(CODECS[kind].dump(message), status, headers, media_type=kind)


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _problem(request: Request, status: int, problem: ErrorResponse, headers: dict[str, str] | None = None) -> Response:
    response = _message(request, problem, status)
    response.headers.update({**(headers or {}), **ERROR_HEADERS.get(status, {})})
    return response


async def _read(request: Request, kind: type[MessageT], max_bytes: int) -> MessageT:
    encoding = content_type(request)
    if encoding not in CODECS:
        raise ServiceError(415, "type", f"content type {encoding!r} is unsupported: use {' or '.join(CODECS)}")
    body = await read_body(request.receive, max_bytes)
    try:
        return await parse_body(partial(CODECS[encoding].load, kind), body)
    except UserError as error:
        code = "unreadable" if isinstance(error, Unreadable) else "invalid"
        raise ServiceError(422, code, str(error)) from error


async def parse_body(parse: Callable[[bytes], T], body: bytes) -> T:
    """Parse long bodies in a thread."""
    return parse(body) if len(body) <= _SHORT_BODY else await asyncio.to_thread(parse, body)


def _verified(
    contexts: Contexts, message: VerifyRequest, owner: str, retry_key: str, clock: Callable[[], float]
) -> Iterator[VerifyResponse | None]:
    """Yield None while the text is read, then the response. Raise `ServiceError` after `_PREFILL_S` of a prefill."""
    end = clock() + _PREFILL_S
    with closing(contexts.verify(message, owner, retry_key)) as items:
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
            raise ServiceError(400, "gone", "the client disconnected")
        return result.result()
    finally:
        for task in (result, disconnect):
            task.cancel()
        await asyncio.gather(result, disconnect, return_exceptions=True)


def serve_model(
    target: LoadedModel, options: ServiceOptions | None = None, hub: Hub | None = None, replica: str = ""
) -> FastAPI:
    """Create the application of a target; `replica`: name of this service."""
    options = options or ServiceOptions()
    invariance, model = target.invariance, target.model
    tokenizer = fingerprint(target.tokenizer)
    identity = identify(target, tokenizer, hub or Hub())
    info = ServiceInfo(
        name=Path(target.spec.name).name,
        vocab_size=target.vocab_size,
        context=min(target.context, 1 << 30),
        stop=sorted(target.stop),
        tokenizer=tokenizer,
        model=identity.model,
        numerics=identity.numerics,
        replica=replica,
        engine=target.engine,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        threads=torch.get_num_threads(),
        weight_bytes=target.weight_bytes,
        bit_equal=invariance.equal,
        chains_only=target.chains_only,
    )
    pieces = cache(lambda: token_bytes(target.tokenizer))
    contexts = Contexts(
        lambda: CachedModel(model, invariance.pad),
        vocab_size=target.vocab_size,
        context=info.context,
        stop=target.stop,
        budget_bytes=options.budget_bytes,
        max_contexts=options.max_contexts,
        expiry_s=options.expiry_s,
        ban=lru_cache(maxsize=8)(lambda texts: BannedText(texts, pieces())),
    )
    worker = Worker(
        waiting=options.waiting, prepare=thread_initializer(), texts=options.texts, has_memory=has_memory_for_text
    )
    return create_app(info, contexts, worker, options)


class _Server(uvicorn.Server):
    """Stop jobs at shutdown, and return; uvicorn would raise the signal again."""

    def __init__(self, config: uvicorn.Config, worker: Worker, announce: Callable[[], object], drain_s: float) -> None:
        super().__init__(config)
        self._worker = worker
        self._announce = announce
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener before jobs end: clients must not connect again."""
        jobs = asyncio.to_thread(self._worker.close, _SHUTDOWN_TIMEOUT_S, self._drain_s)
        await asyncio.gather(super().shutdown(sockets), jobs)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with handle_signals(self.handle_exit, signal.SIGINT, signal.SIGTERM):
            yield


def listen(
    app: FastAPI,
    listener: socket.socket,
    certificate: Path | None = None,
    key: Path | None = None,
    stdin: IO[bytes] | None = None,
    announce: Callable[[], object] = lambda: None,
    connections: ConnectionLimits = ConnectionLimits(),  # noqa: B008  # frozen
    drain_s: float = 0.0,
) -> None:
    """Serve until SIGINT, SIGTERM or the end of `stdin`; call `announce` when ready."""
    config = uvicorn.Config(
        app,
        loop="asyncio",  # uvloop would not call `LimitedListener.accept`
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S + math.ceil(drain_s),
        ssl_certfile=certificate and str(certificate),
        ssl_keyfile=key and str(key),
    )
    app.add_middleware(VisitorConnections, limits=connections)
    proxies = limit_connections(config, connections)
    if certificate is not None:
        listener = LimitedListener(listener, connections, proxies)
    server = _Server(config, app.state.worker, announce, drain_s)
    if stdin is not None:
        call_at_end(stdin, lambda: server.handle_exit(signal.SIGTERM, None))
    server.run(sockets=[listener])


def call_at_end(file: IO[bytes], call: Callable[[], object]) -> None:
    """Make the call in a thread when `file` ends."""

    def watch(descriptor: int) -> None:
        while os.read(descriptor, 4096):  # a buffered reader blocks the interpreter's exit
            pass
        call()

    threading.Thread(target=watch, args=(file.fileno(),), daemon=True).start()


class Unhealthy(RuntimeError):
    """The service must be replaced; the cause is the error of a probe, if any."""


@dataclass(eq=False)
class JobHealth:
    """Health of the jobs of a worker.

    An idle worker without a token in the last `recent_s` runs a probe. A busy worker is healthy while its jobs advance.
    """

    worker: Worker
    start_probe: Callable[[], Stream[Any]]
    patience_s: float = STALLED_S
    token_age_s: Callable[[], float] = lambda: math.inf
    recent_s: float = 0.0
    probe: Stream[Any] | None = None  # the latest one
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> str:
        """Return the sign of health. Raises `Unhealthy`."""
        age_s = self.token_age_s()
        if age_s <= self.recent_s:
            return f"a token was produced {age_s:.0f} s ago"
        probe = None
        with self._lock, suppress(WorkerBusy):  # jobs were submitted meanwhile
            if not self.worker.active:
                probe = self.probe = self.start_probe()
        if probe is not None and probe.wait(self.patience_s):
            if probe.error is None:
                return "the service was idle, and a probe produced a token"
            raise Unhealthy(f"an idle service cannot decode a token: {probe.error}") from probe.error
        stalled_s = self.worker.stalled_s
        if stalled_s >= self.patience_s:
            raise Unhealthy(f"no step was completed for {stalled_s:.0f} s: the device does not respond")
        return "jobs advance"


def service_health(worker: Worker, contexts: Contexts) -> JobHealth:
    """Return the health check of a service; its probe decodes a token."""
    return JobHealth(worker, lambda: worker.submit(lambda: contexts.stream(_PROBE)))
