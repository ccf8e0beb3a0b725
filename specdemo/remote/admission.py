"""Admission of connections and requests, for service and page: their number, token, rate, size and time of bodies."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import math
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
import uvicorn
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdemo.remote.access import is_foreign, is_known_host, is_loopback, parse_ip
from specdemo.remote.protocol import SESSION_HEADER, ErrorResponse
from specdemo.worker import MOST_TEXTS

_CHECK_S = 1.0
_GRACE_S = 1.0
_REFUSAL = b"too many connections: retry"
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%s" % (len(_REFUSAL), _REFUSAL)
)
_WS_BYTES = 4096  # largest message; browsers send none
_TRY_LATER = 1013  # close code of WebSockets
_SESSION = re.compile(r"[A-Za-z0-9_-]{32,128}")
_WRONG_TOKENS = (1.0, 20)  # attempts per second and address, and attempts in a burst
_MOST_BUCKETS = 4096  # full buckets are retained below this number
_PURGE_S = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server. `None` means unlimited; `per_visitor` excludes this machine."""

    total: int | None = 512
    per_visitor: int | None = 64
    seconds: float = 10.0  # duration of a header, a body, and a pause of a reader

    def is_exceeded(self, address: str, addresses: Collection[str], proxies: Collection[str]) -> bool:
        """Return True if the connection from `address`, one of the open `addresses`, is one too many."""
        if self.total is not None and len(addresses) > self.total:
            return True
        if self.per_visitor is None or is_loopback(address) or address in proxies:
            return False
        return sum(network_of(other) == network_of(address) for other in addresses) > self.per_visitor


def network_of(address: str) -> str:
    """Return an IPv4 address or an IPv6 /64 network."""
    ip = parse_ip(address.partition("%")[0])
    if ip is None:
        return address
    if ip.version == 6 and ip.ipv4_mapped is None:
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip if ip.version == 4 else ip.ipv4_mapped)


def limit_connections(config: uvicorn.Config, limits: ConnectionLimits) -> Collection[str]:
    """Limit future connections of a server; return its trusted proxies."""
    if not config.loaded:
        config.load()
    middleware = ProxyHeadersMiddleware(config.app, config.forwarded_allow_ips)  # type: ignore[arg-type]
    proxies: Any = middleware.trusted_hosts
    protocol: Any = partial(LimitedProtocol, limits=limits, proxies=proxies)
    config.http_protocol_class = protocol
    config.ws_max_size = _WS_BYTES
    return proxies


class LimitedListener(socket.socket):
    """Listening socket that closes connections above the limits, before their TLS handshakes.

    It replaces `listener`, which is detached.
    """

    def __init__(self, listener: socket.socket, limits: ConnectionLimits, proxies: Collection[str]) -> None:
        super().__init__(listener.family, listener.type, listener.proto, listener.detach())
        self._limits, self._proxies = limits, proxies
        self._accepted: dict[socket.socket, str] = {}  # open connections and their addresses

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises `ConnectionAbortedError`, which servers ignore, for one too many."""
        connection, name = super().accept()
        self._accepted = {other: address for other, address in self._accepted.items() if other.fileno() >= 0}
        self._accepted[connection] = name[0]
        if self._limits.is_exceeded(name[0], self._accepted.values(), self._proxies):
            connection.close()
            raise ConnectionAbortedError("too many connections")
        return connection, name


class LimitedProtocol(H11Protocol):
    """HTTP connection, refused above the limits and closed without progress."""

    def __init__(self, *args: Any, limits: ConnectionLimits, proxies: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._proxies = proxies
        self._state: tuple[tuple[str, object] | None, int] = None, 0  # expected part, unread bytes
        self._since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        clients = [getattr(other, "client", None) for other in self.connections]
        addresses = [client[0] if client else "" for client in clients]
        if self._limits.is_exceeded(self.client[0] if self.client else "", addresses, self._proxies):
            transport.write(_FULL)
            transport.close()
            self.connections.discard(self)  # otherwise it would count until it is closed
        self._check_progress(transport)

    def _check_progress(self, transport: asyncio.Transport) -> None:
        state = self._expected_part(), transport.get_write_buffer_size()
        expected, unread = state
        if transport.is_closing() and not unread:
            return
        if state != self._state:
            self._state = state
            self._since = self.loop.time()
        late_s = self.loop.time() - self._since - self._limits.seconds
        if unread and late_s >= 0:
            transport.abort()
            return
        if expected and late_s >= _GRACE_S * (expected[0] == "body"):
            transport.close()
        self.loop.call_later(min(_CHECK_S, self._limits.seconds / 4), self._check_progress, transport)

    def _expected_part(self) -> tuple[str, object] | None:
        """Return the part of a request that the client has to send."""
        if self not in self.connections:  # upgraded to a WebSocket
            return None
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        idle = self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]
        return ("header", self.cycle) if self.conn.their_state is h11.IDLE and not idle else None


class VisitorConnections:
    """ASGI middleware that limits the open requests of a visitor, also with a proxy."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits) -> None:
        self._app, self._most = app, limits.per_visitor
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = scope["client"][0] if scope.get("client") else ""
        if scope["type"] == "lifespan" or self._most is None or is_loopback(address):
            return await self._app(scope, receive, send)
        visitor = network_of(address)
        if self._open[visitor] >= self._most:
            if scope["type"] == "websocket":
                return await WebSocketClose(_TRY_LATER)(scope, receive, send)
            cause = "too many connections from this address: close some, or try again later"
            return await JSONResponse({"detail": cause}, 429, {"connection": "close"})(scope, receive, send)
        self._open[visitor] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[visitor] -= 1
            if not self._open[visitor]:
                del self._open[visitor]


BODY_S = ConnectionLimits.seconds


@dataclass(frozen=True)
class ServiceOptions:
    """Access and limits of a service; rates are per token or client address."""

    token: str | None = None  # tokens, separated by spaces
    local: bool = False  # without a token, refuse names of other hosts
    origins: Sequence[str] = ()  # sites with access
    body_bytes: int = 4 << 20
    requests_per_second: float = 0.0  # 0: unlimited
    burst: int = 50
    budget_bytes: int = 2 << 30  # of contexts
    max_contexts: int = 256
    expiry_s: float = 600.0
    waiting: int = 64  # queued jobs
    texts: int = MOST_TEXTS  # texts that share passes


class RateLimiter:
    """Token bucket per address or token, refilled at `rate` per second."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst = rate, burst
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # remaining requests, time
        self._next_purge = -math.inf

    def allow(self, address: str) -> bool:
        if not self._rate:
            return True
        now = self._clock()
        if len(self._buckets) > _MOST_BUCKETS and now >= self._next_purge:
            self._next_purge = now + _PURGE_S
            self._buckets = {address: b for address, b in self._buckets.items() if self._refilled(b, now) < self._burst}
        left = self._refilled(self._buckets.get(address, (float(self._burst), now)), now)
        self._buckets[address] = (left - (left >= 1), now)
        return left >= 1

    def _refilled(self, bucket: tuple[float, float], now: float) -> float:
        left, updated = bucket
        return min(self._burst, left + (now - updated) * self._rate)


class ServiceError(Exception):
    """Error that becomes a response with a status code."""

    def __init__(self, status: int, code: str, sentence: str, position: int = 0) -> None:
        super().__init__(sentence)
        self.status, self.problem = status, ErrorResponse(error=sentence, code=code, position=position)


def context_owner(request: Request) -> str:
    """Return the hash of token and session; of the address without both. Raises `ServiceError`."""
    session, token = request.headers.get(SESSION_HEADER, ""), request.state.token
    if session and not _SESSION.fullmatch(session):
        raise ServiceError(
            422, "invalid", f"{SESSION_HEADER} must be 32 to 128 letters, digits, - or _: send random bits, or omit it"
        )
    identity = session or ("" if token else _address(request))
    return hashlib.sha256(f"{token}\0{identity}".encode()).hexdigest()


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def admission(options: ServiceOptions, clock: Callable[[], float] = time.monotonic) -> Callable[..., None]:
    """Return the dependency that admits requests. Clients of a balancer share an address: only wrong tokens count."""
    tokens = (options.token or "").split()
    rates = RateLimiter(options.requests_per_second, options.burst, clock)
    failures = RateLimiter(*_WRONG_TOKENS, clock)
    bearer = HTTPBearer(auto_error=False)

    def admit(request: Request, sent: HTTPAuthorizationCredentials | None = Depends(bearer)) -> None:  # noqa: B008
        if options.local and not tokens and not is_known_host(request.headers.get("host", ""), ()):
            raise ServiceError(403, "host", "this service serves its own machine: use its address, or localhost")
        is_allowed = request.headers.get("origin") in options.origins
        if request.method not in ("GET", "HEAD") and not is_allowed and is_foreign(request.headers):
            raise ServiceError(403, "origin", "pages of other sites cannot use this service: send no Origin")
        client, token = network_of(_address(request)), sent.credentials if sent and tokens else ""
        if tokens and not any(secrets.compare_digest(token.encode(), known.encode()) for known in tokens):
            if not failures.allow(client):
                raise ServiceError(429, "busy", "too many wrong tokens from this address: try again in a few seconds")
            raise ServiceError(
                401, "unauthorised", "the bearer token is missing or wrong: set SPECDEMO_TOKEN to the service's token"
            )
        request.state.token = token
        if not rates.allow(token if len(tokens) > 1 else client):
            raise ServiceError(429, "busy", "too many requests from this client: reduce the request rate")

    return admit


async def read_body(receive: Receive, max_bytes: int, announced: int = 0) -> bytes:
    """Read a body of `announced` bytes (0: unknown). Raises `ServiceError`."""
    body = bytearray()
    more = True
    try:
        async with asyncio.timeout(BODY_S):
            while more and max(len(body), announced) <= max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ServiceError(400, "gone", "the client disconnected")
                body.extend(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        sentence = f"the body did not arrive within {BODY_S:g} seconds: send it again"
        raise ServiceError(408, "slow", sentence) from None
    if max(len(body), announced) > max_bytes:
        raise ServiceError(413, "too_large", f"the body has more than {max_bytes:,} bytes: split the request")
    return bytes(body)
