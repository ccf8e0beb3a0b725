"""Access control of the page over HTTP: routes, host names, origins, body sizes, request rates and private sessions.

Names of sessions are replaced by digests of name and cookie, without cookies of name and address.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Collection, Mapping
from traceback import format_tb
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from specdemo.core.trace import MAX_CHARACTERS
from specdemo.remote.access import RouteInfo, is_foreign, is_known_host
from specdemo.remote.admission import RateLimiter, ServiceError, VisitorConnections, network_of, read_body
from specdemo.ui.documents import DOCUMENT_PATH
from specdemo.ui.limits import HostLimits, address_of
from specdemo.ui.page_files import FILE_PATH, PICTURE_PATH, PageHead
from specdemo.ui.runs import FRAMES, RECORDINGS, RUNS, SESSIONS, TRACE, TRACES

_log = logging.getLogger(__name__)

_NO_ROUTE = "there is no such route: if a proxy serves this page under another path, set GRADIO_ROOT_PATH to it"
_OTHER_SITE = "pages of other sites cannot use this page: a proxy must pass on the header Host"

_API = "/gradio_api"
_FILES = "installed files"
_RUNS = "rate, 2 MB; limits of runs"
PAGE_ROUTES = (
    RouteInfo("GET, HEAD", "/", "page"),
    RouteInfo("GET", "/lessons", "lessons on recorded runs"),
    RouteInfo("GET", DOCUMENT_PATH, "documents as HTML"),
    RouteInfo("GET", "/config", "layout of the page"),
    RouteInfo("GET", "/static/{path:path}", "fonts and pictures of Gradio", _FILES),
    RouteInfo("GET", "/assets/{path:path}", "scripts and styles of Gradio", _FILES),
    RouteInfo("GET", "/svelte/{path:path}", "scripts of Gradio", _FILES),
    RouteInfo("GET", FILE_PATH, "scripts of the page, and the page without a run that visitors save"),
    RouteInfo("GET", "/theme.css", "colours"),
    RouteInfo("GET", f"{_API}/theme.css", "colours"),
    RouteInfo("GET", "/favicon.ico", "icon"),
    RouteInfo("GET", PICTURE_PATH, "picture of link previews"),
    RouteInfo("GET", "/robots.txt", "rules for crawlers"),
    RouteInfo("GET", "/manifest.json", "description of the installable app"),
    RouteInfo("GET", "/pwa_icon", "icon of the app"),
    RouteInfo("GET", "/pwa_icon/192", "icon of the app", "one size"),
    RouteInfo("GET", "/pwa_icon/512", "icon of the app", "one size"),
    RouteInfo("GET", "/health", "health check", "one probe at a time, at most every 10 minutes"),
    RouteInfo("POST", RUNS, "start of a run", _RUNS),
    RouteInfo("WEBSOCKET", FRAMES, "frames of a run", "unguessable id"),
    RouteInfo("GET", FRAMES, "next frame of a run", "unguessable id"),
    RouteInfo("POST", FRAMES, "end of a run", "rate, unguessable id"),
    RouteInfo("POST", SESSIONS, "end of a session", "rate, own session"),
    RouteInfo("GET", f"{_API}/info", "description of the API"),
    RouteInfo("GET", f"{_API}/openapi.json", "description of the API"),
    RouteInfo("GET", f"{_API}/startup-events", "start of the event queue"),
    RouteInfo("GET", f"{_API}/app_id", "detection of a restart"),
    RouteInfo("POST", f"{_API}/queue/join", "events: settings, tabs", _RUNS),
    RouteInfo("GET", f"{_API}/queue/data", "results of events", "own session"),
    RouteInfo("GET", f"{_API}/queue/status", "length of the event queue"),
    RouteInfo("POST", f"{_API}/run/{{api_name}}", "events without a queue", "rate, 2 MB"),
    RouteInfo("POST", f"{_API}/call/{{api_name}}", "API", _RUNS),
    RouteInfo("GET", f"{_API}/call/{{api_name}}/{{event_id}}", "results of the API", "unguessable id"),
    RouteInfo("POST", f"{_API}/cancel", "end of an event", "rate, 2 MB"),
    RouteInfo("POST", f"{_API}/reset", "end of an event", "rate, 2 MB"),
    RouteInfo("POST", TRACES, "opened traces", "rate, `SPECDEMO_MAX_TRACE`; opened traces count as runs"),
    RouteInfo("GET", TRACE, "trace of a lane, or of all", "unguessable id"),
    RouteInfo("POST", RECORDINGS, "recorded traces", "rate"),
)
_MAX_BODY = 2_000_000  # bytes
_COMPRESSED = 1_000  # bytes of a response
_KINDS = {TRACES: "application/x-ndjson"}  # content types
_REQUESTS_PER_RUN = 25  # POST requests, for example of tabs and recorded traces

COOKIE = "specdemo-visitor"
FIELD = "session_hash"
_NAME = re.compile(r"[A-Za-z0-9_-]{8,64}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{22,64}")

_FIRST_PAGES = ("/", "/lessons", "/config")
_FRAMES_OF_SPACES = ("https://huggingface.co", "https://*.hf.space")

# Gradio uses inline scripts and compiles functions.
_POLICY = {
    "default-src": "'self'",
    "script-src": "'self' 'unsafe-inline' 'unsafe-eval'",
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "worker-src": "'self' blob:",
    "object-src": "'none'",
    "base-uri": "'self'",
    "form-action": "'self'",
}


def space_hosts(environment: Mapping[str, str]) -> list[str]:
    return environment.get("SPACE_HOST", "").replace(",", " ").lower().split()


def gateway(limits: HostLimits, environment: Mapping[str, str]) -> tuple[list[Middleware], set[str] | None]:
    """Return the middleware and its permitted host names, a mutable set."""
    hosts = None if limits.hosts is None else {*limits.hosts, *space_hosts(environment)}
    on_space = "SPACE_ID" in environment
    frames = (*limits.frames, *(_FRAMES_OF_SPACES if on_space else ()))
    middleware = [
        Middleware(VisitorConnections, limits=limits.of_connections),
        Middleware(Gateway, limits=limits, hosts=hosts, frames=frames),
        Middleware(GZipMiddleware, minimum_size=_COMPRESSED, compresslevel=6),
        Middleware(PageHead, keeps_root=on_space),
    ]
    return middleware, hosts


class Gateway:
    """ASGI middleware that restricts the page to `PAGE_ROUTES`. Pages of the origins `frames` may frame it."""

    def __init__(
        self, app: ASGIApp, limits: HostLimits, hosts: Collection[str] | None, frames: Collection[str] = ()
    ) -> None:
        self._app, self._hosts = app, hosts
        self._framed = bool(frames)
        self._patterns = [(route.methods.split(", "), compile_path(route.path)[0]) for route in PAGE_ROUTES]
        rate = _REQUESTS_PER_RUN * (limits.per_minute or 0)
        self._rates = RateLimiter(rate / 60, rate)
        self._max_trace = 2 * (limits.max_trace or MAX_CHARACTERS)  # bytes
        policy = _POLICY | {"frame-ancestors": " ".join(("'self'", *frames))}
        self._headers = {
            "Content-Security-Policy": "; ".join(f"{name} {sources}" for name, sources in policy.items()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "same-origin",  # links contain prompts
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        scope = _below_root(scope)
        try:
            headers = Headers(scope=scope)
            self._check(scope, headers)
            hide_in_address(scope)
            if scope.get("method") == "POST":
                receive = _replayed(await self._body(scope, receive, headers), receive)
        except ServiceError as error:
            return await self._refuse(error, scope, receive, send)
        if scope["type"] == "websocket":
            return await self._app(scope, receive, send)
        await self._respond(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise `ServiceError` for hosts, routes, origins, types and rates that the page does not serve."""
        method, path = scope.get("method", "WEBSOCKET"), _path(scope)
        if self._hosts is not None and not is_known_host(headers.get("host", ""), self._hosts):
            raise ServiceError(403, "host", "unknown host name: set SPECDEMO_HOSTS to the names of this page")
        if not any(method in methods and pattern.match(path) for methods, pattern in self._patterns):
            raise ServiceError(404, "http", _NO_ROUTE)
        if method in ("GET", "HEAD"):
            return
        if is_foreign(headers, self._hosts or ()):
            raise ServiceError(403, "origin", _OTHER_SITE)
        kind = _KINDS.get(path, "application/json")
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != kind:
            raise ServiceError(415, "invalid", f"send {kind}")
        if not self._rates.allow(network_of(address_of(HTTPConnection(scope)))):
            raise ServiceError(429, "busy", "too many requests: try again in a minute")

    async def _body(self, scope: Scope, receive: Receive, headers: Headers) -> bytes:
        is_trace = _path(scope) == TRACES
        max_bytes = self._max_trace if is_trace else _MAX_BODY
        body = await read_body(receive, max_bytes, int(headers.get("content-length", 0)))
        if is_trace:
            return body
        try:
            value = json.loads(body, object_hook=_without_file)
        except (ValueError, RecursionError):
            raise ServiceError(400, "invalid", "the request is not JSON") from None
        if not isinstance(value, dict):
            raise ServiceError(400, "invalid", "the request is not a JSON object")
        return json.dumps(hide_in_body(scope, value)).encode()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        cookie = new_cookie(scope, self._framed) if scope["path"] in _FIRST_PAGES else None

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update(self._headers)
                if cookie is not None:
                    MutableHeaders(scope=message).append("set-cookie", cookie)
                if message["status"] == 500 and scope["path"].startswith(f"{_API}/run/"):
                    message["status"] = 422  # an event refused its values
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:  # the message can quote a visitor
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            _log.error("a request failed: %s\n%s", type(cause).__name__, "".join(format_tb(cause.__traceback__)))
            if not started:
                failure = ServiceError(500, "failed", "the page failed: reload it and try again")
                await self._refuse(failure, scope, receive, send)

    async def _refuse(self, error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
        _log.info("refused with status %d: %s", error.status, error)
        if scope["type"] == "websocket":
            return await WebSocketClose(1008)(scope, receive, send)
        closing = {"Connection": "close"} if error.status in (408, 413) else {}
        await JSONResponse({"detail": str(error)}, error.status, self._headers | closing)(scope, receive, send)


def _below_root(scope: Scope) -> Scope:
    """Remove the path of GRADIO_ROOT_PATH, as some proxies do."""
    root = urlsplit(scope.get("root_path", "")).path.strip("/")
    if not root or not f"{scope['path']}/".startswith(f"/{root}/"):
        return scope
    path = scope["path"].removeprefix(f"/{root}") or "/"
    return {**scope, "path": path, "raw_path": quote(path).encode()}


def _without_file(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object. Raises `ServiceError` for the description of a file, which Gradio would open or load."""
    if "meta" in value:
        raise ServiceError(400, "invalid", "files are not accepted: reload the page")
    return value


def _path(scope: Scope) -> str:
    return scope["path"].rstrip("/") or "/"


def _replayed(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def hide_in_address(scope: Scope) -> None:
    """Replace the name of the session in the query. Raises `ServiceError`."""
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    if any(name == FIELD for name, _ in query):
        hidden = [(name, _private(scope, value) if name == FIELD else value) for name, value in query]
        scope["query_string"] = urlencode(hidden).encode()


def hide_in_body(scope: Scope, body: dict[str, Any]) -> dict[str, Any]:
    """Replace the name of the session in a JSON object. Raises `ServiceError`."""
    name = body.get(FIELD)
    return body if name is None else {**body, FIELD: _private(scope, name)}


def new_cookie(scope: Scope, framed: bool) -> str | None:
    """Return the cookie of a new browser. `framed`: other sites may frame the page, over https or from localhost.

    Without a path it belongs to the folder of the page, also where a proxy serves other pages above it.
    """
    if _secret(scope) is not None:
        return None
    attributes = "HttpOnly; SameSite=Lax"
    if framed:
        attributes = "HttpOnly; Secure; SameSite=None; Partitioned"
    elif scope["scheme"] == "https":
        attributes += "; Secure"
    return f"{COOKIE}={secrets.token_urlsafe(24)}; {attributes}"


def _private(scope: Scope, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        sentence = f"the {FIELD} must have 8 to 64 letters, digits, - or _: reload the page"
        raise ServiceError(400, "invalid", sentence)
    secret = _secret(scope)
    owner = f"address {network_of(address_of(HTTPConnection(scope)))}" if secret is None else f"cookie {secret}"
    return hashlib.sha256(f"{owner} {name}".encode()).hexdigest()


def _secret(scope: Scope) -> str | None:
    value = HTTPConnection(scope).cookies.get(COOKIE, "")
    return value if _SECRET.fullmatch(value) else None
