"""Admission of requests: token, rate, size and time of the body, for service and page; owner of contexts."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.types import Receive

from specdemo.remote.access import is_foreign, is_known_host
from specdemo.remote.connections import ConnectionLimits, network_of
from specdemo.remote.protocol import SESSION_HEADER, ErrorResponse
from specdemo.worker import MOST_TEXTS

_SESSION = re.compile(r"[A-Za-z0-9_-]{32,128}")
_WRONG_TOKENS = (1.0, 20)  # attempts per second and address, and attempts in a burst
_MOST_BUCKETS = 4096  # full buckets are retained below this number
_PURGE_S = 1.0
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
                    raise client_gone()
                body.extend(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        sentence = f"the body did not arrive within {BODY_S:g} seconds: send it again"
        raise ServiceError(408, "slow", sentence) from None
    if max(len(body), announced) > max_bytes:
        raise ServiceError(413, "too_large", f"the body has more than {max_bytes:,} bytes: split the request")
    return bytes(body)


def client_gone() -> ServiceError:
    return ServiceError(400, "gone", "the client disconnected")
