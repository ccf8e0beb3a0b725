"""Routes of the endpoint on the service: authorization, errors and streams in the shape of OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute

from specdemo.completions.fields import InvalidParameter
from specdemo.completions.requests import ChatRequest, CompletionRequest, TextRequest, parse_request
from specdemo.completions.responses import COMMENT, DONE, event_line
from specdemo.completions.service import CompletionService
from specdemo.core.errors import PromptTooLong, UserError
from specdemo.core.events import End, Event, Header
from specdemo.recipe import Recipe
from specdemo.remote.access import RouteInfo
from specdemo.remote.admission import ServiceError, context_owner, read_body
from specdemo.remote.server import (
    ERROR_HEADERS,
    TOO_LONG,
    content_type,
    parse_body,
    started_stream,
    stream_queued,
    while_connected,
)

_LIMITS = "token, rate, body, queue; length of the context"
COMPLETION_ROUTES = (
    RouteInfo("GET", "/v1/models", "names of the served pair", "token, rate"),
    RouteInfo("GET", "/v1/models/{model}", "description of a name", "token, rate"),
    RouteInfo("POST", "/v1/chat/completions", "answer to a conversation", _LIMITS),
    RouteInfo("POST", "/v1/completions", "continuation of a text", _LIMITS),
)
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {"unauthorised": "invalid_api_key", "busy": "rate_limit_exceeded"}


class _OpenAIRoute(APIRoute):
    """Route with errors in the shape of OpenAI."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def respond(request: Request) -> Response:
            try:
                return await handle(request)
            except (UserError, ServiceError) as error:
                status, body = error_of(error)
                return JSONResponse(body, status, ERROR_HEADERS.get(status))

        return respond


def error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body."""
    if isinstance(error, InvalidParameter):
        return _status_and_body(error.status, str(error), error.code, error.parameter)
    if isinstance(error, PromptTooLong) or (isinstance(error, ServiceError) and error.problem.code == TOO_LONG):
        return _status_and_body(400, f"{error} ({TOO_LONG})", TOO_LONG)
    if isinstance(error, ServiceError) and error.status != 422:
        return _status_and_body(error.status, str(error), _CODES.get(error.problem.code, error.problem.code))
    if isinstance(error, (UserError, ServiceError)):
        return _status_and_body(400, str(error), "invalid_value")
    return _status_and_body(500, "the run failed: see the log of the service", "internal_error")


def _status_and_body(status: int, message: str, code: str, parameter: str | None = None) -> tuple[int, dict[str, Any]]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, {"error": {"message": message, "type": kind, "param": parameter, "code": code}}


def add_completions(app: FastAPI, service: CompletionService) -> None:
    """Add the endpoint to a service."""
    admission = [Depends(app.state.admission)]
    router = APIRouter(route_class=_OpenAIRoute, dependencies=admission, include_in_schema=False)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, name) for name in service.models]}

    @router.get("/v1/models/{model}")
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return _model(service, model)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _complete(app, service, request, ChatRequest)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _complete(app, service, request, TextRequest)

    app.include_router(router)


def _model(service: CompletionService, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.created, "owned_by": "specdemo"}


async def _complete(
    app: FastAPI, service: CompletionService, request: Request, kind: type[CompletionRequest]
) -> Response:
    if content_type(request) != "application/json":
        raise ServiceError(415, "unsupported_media_type", "the content type must be application/json: set it")
    body = await read_body(request.receive, app.state.options.body_bytes)

    def prepare(body: bytes) -> tuple[CompletionRequest, list[Recipe]]:
        parsed = parse_request(kind, body)
        return parsed, [service.recipe_of(request) for request in parsed.requests]

    parsed, recipes = await parse_body(prepare, body)
    owner = context_owner(request)
    runs = [
        stream_queued(app.state.worker, partial(service.events, prompt, recipe, owner))
        for prompt, recipe in zip(parsed.requests, recipes, strict=True)
    ]
    if not parsed.stream:
        return JSONResponse(await _whole(request, service, parsed, runs))
    chunks = kept_open(_chunks(service, parsed, runs[0]), service.keep_alive_s)
    started = await started_stream(request, chunks, lambda error: event_line(error_of(error)[1]))
    return StreamingResponse(started, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _whole(
    request: Request, service: CompletionService, parsed: CompletionRequest, runs: Sequence[AsyncGenerator[Event, None]]
) -> dict[str, Any]:
    answers = service.answers(parsed)
    for answer, events in zip(answers, runs, strict=True):
        async with aclosing(events):
            while answer.finish_reason is None:
                event = await while_connected(request, anext(events))
                _raise_failure(event)
                answer.add(event)
    return service.format(parsed).complete(answers)


def _raise_failure(event: Event) -> None:
    if isinstance(event, End) and event.reason == "error":
        raise ServiceError(500, "run_failed", event.error or "the run failed")


async def _chunks(
    service: CompletionService, parsed: CompletionRequest, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[bytes, None]:
    response = service.format(parsed)
    (answer,) = service.answers(parsed)
    async with aclosing(events):
        async for event in events:
            _raise_failure(event)
            part = answer.add(event)
            if isinstance(event, Header):
                yield b"".join(event_line(chunk) for chunk in response.first())
            if part.text or part.tokens or isinstance(event, End):
                yield event_line(response.chunk(part, answer))
    if parsed.stream_options.include_usage or parsed.stream_options.speculation:
        yield event_line(response.usage(answer))
    yield DONE


async def kept_open(chunks: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """Yield the chunks, and a comment after `seconds` without one, so that proxies keep the connection open."""
    waiting: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(chunks, None))
            await asyncio.wait([waiting], timeout=seconds)
            if not waiting.done():
                yield COMMENT
                continue
            chunk = waiting.result()
            waiting = None
            if chunk is None:
                return
            yield chunk
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await chunks.aclose()
