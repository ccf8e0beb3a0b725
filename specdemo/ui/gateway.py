"""Access control of the page over HTTP. It checks routes, host names, origins, body sizes and request rates."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from specdemo.remote.access import RouteInfo, is_foreign, is_known_host
from specdemo.remote.server import RateLimiter
from specdemo.ui.limits import HostLimits, network_of

_log = logging.getLogger(__name__)

_API = "/gradio_api"
_FILES = "files of the installed packages"
_RUNS = "rate, 2 MB; runs: `SPECDEMO_PER_MINUTE`, `SPECDEMO_AT_ONCE`, `SPECDEMO_QUEUE`"
PAGE_ROUTES = (
    RouteInfo("GET, HEAD", "/", "page"),
    RouteInfo("GET", "/config", "layout of the page"),
    RouteInfo("GET", "/static/{path:path}", "fonts and pictures of Gradio", _FILES),
    RouteInfo("GET", "/assets/{path:path}", "scripts and styles of Gradio", _FILES),
    RouteInfo("GET", "/svelte/{path:path}", "scripts of Gradio", _FILES),
    RouteInfo("GET", "/theme.css", "colours"),
    RouteInfo("GET", f"{_API}/theme.css", "colours"),
    RouteInfo("GET", "/favicon.ico", "icon"),
    RouteInfo("GET", "/robots.txt", "rules for crawlers"),
    RouteInfo("GET", "/manifest.json", "description of the installable app"),
    RouteInfo("GET", "/pwa_icon", "icon of the app"),
    RouteInfo("GET", "/pwa_icon/192", "icon of the app", "one size"),
    RouteInfo("GET", "/pwa_icon/512", "icon of the app", "one size"),
    RouteInfo("GET", "/health", "health check", "one probe at a time, at most every 10 minutes"),
    RouteInfo("WEBSOCKET", "/frames/{run}", "frames of a run", "unguessable id"),
    RouteInfo("GET", f"{_API}/info", "description of the API"),
    RouteInfo("GET", f"{_API}/openapi.json", "description of the API"),
    RouteInfo("GET", f"{_API}/startup-events", "start of the event queue"),
    RouteInfo("GET", f"{_API}/app_id", "detection of a restart"),
    RouteInfo("GET", f"{_API}/heartbeat/{{session_hash}}", "detection of closed tabs", "64 sessions"),
    RouteInfo("POST", f"{_API}/queue/join", "events: runs, settings, tabs", _RUNS),
    RouteInfo("GET", f"{_API}/queue/data", "results of events", "own session"),
    RouteInfo("GET", f"{_API}/queue/status", "length of the event queue"),
    RouteInfo("POST", f"{_API}/run/{{api_name}}", "events without a queue", "rate, 2 MB"),
    RouteInfo("POST", f"{_API}/call/{{api_name}}", "API", _RUNS),
    RouteInfo("GET", f"{_API}/call/{{api_name}}/{{event_id}}", "results of the API", "unguessable id"),
    RouteInfo("POST", f"{_API}/cancel", "end of an event", "rate, 2 MB"),
    RouteInfo("POST", f"{_API}/reset", "end of an event", "rate, 2 MB"),
    RouteInfo(
        "POST",
        f"{_API}/component_server",
        "steps, tables and exports of a run; opened traces; stop",
        "rate, `SPECDEMO_MAX_TRACE`; opened traces count as runs",
    ),
)
_MAX_BODY = 2_000_000  # bytes
_REQUESTS_PER_RUN = 25  # POST requests, for example to inspect steps

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


def gateway(limits: HostLimits, environment: Mapping[str, str]) -> tuple[Middleware, set[str] | None]:
    """Return the middleware and its permitted host names, a mutable set."""
    hosts = None if limits.hosts is None else {*limits.hosts, *space_hosts(environment)}
    return Middleware(Gateway, limits=limits, hosts=hosts, framed="SPACE_ID" in environment), hosts


class Gateway:
    """ASGI middleware that restricts the page to `PAGE_ROUTES`. If `framed`, Hugging Face may embed the page."""

    def __init__(self, app: ASGIApp, limits: HostLimits, hosts: Collection[str] | None, framed: bool = False) -> None:
        self._app, self._hosts = app, hosts
        self._patterns = [(route.methods.split(", "), compile_path(route.path)[0]) for route in PAGE_ROUTES]
        rate = _REQUESTS_PER_RUN * (limits.per_minute or 0)
        self._rates = RateLimiter(rate / 60, rate)
        self._max_trace = 2 * (limits.max_trace or 0) + _MAX_BODY  # quotes are escaped in JSON
        frames = "'self' https://huggingface.co https://*.hf.space" if framed else "'self'"
        self._headers = {
            "Content-Security-Policy": "; ".join(
                f"{k} {v}" for k, v in (_POLICY | {"frame-ancestors": frames}).items()
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "same-origin",  # links contain prompts
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            return await self._refuse(refusal, scope, receive, send)
        if scope["type"] == "websocket":
            return await self._app(scope, receive, send)
        body = _Body(receive, self._max_trace if scope["path"].rstrip("/").endswith("/component_server") else _MAX_BODY)
        if int(headers.get("content-length", 0)) > body.max_bytes:
            return await self._refuse(
                (413, f"the request has more than {body.max_bytes:,} bytes"), scope, receive, send
            )

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await self._app(scope, body.receive, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        method = scope.get("method", "WEBSOCKET")
        if self._hosts is not None and not is_known_host(headers.get("host", ""), self._hosts):
            return 403, "unknown host name: set SPECDEMO_HOSTS to the names of this page"
        path = scope["path"].rstrip("/") or "/"
        if not any(method in methods and pattern.match(path) for methods, pattern in self._patterns):
            return 404, "there is no such route"
        if method in ("GET", "HEAD"):
            return None
        if is_foreign(headers, self._hosts or ()):
            return 403, "pages of other sites cannot use this page"
        if not headers.get("content-length", "0").isdecimal():
            return 400, "invalid length"
        address = scope["client"][0] if scope.get("client") else ""
        if not self._rates.allow(network_of(address)):
            return 429, "too many requests: try again in a minute"
        return None

    async def _refuse(self, refusal: tuple[int, str], scope: Scope, receive: Receive, send: Send) -> None:
        status, cause = refusal
        _log.info("refused with status %d: %s", status, cause)
        if scope["type"] == "websocket":
            return await WebSocketClose(1008)(scope, receive, send)
        await JSONResponse({"detail": cause}, status, self._headers)(scope, receive, send)


class _Body:
    """Bounded request body; a longer one ends like a closed connection."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive, self.max_bytes = receive, max_bytes
        self._count = 0  # bytes received

    async def receive(self) -> Any:
        message = await self._receive()
        self._count += len(message.get("body", b""))
        return message if self._count <= self.max_bytes else {"type": "http.disconnect"}
