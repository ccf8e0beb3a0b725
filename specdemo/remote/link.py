"""HTTP client of the cloud service, byte counts and link emulation."""

from __future__ import annotations

import math
import random
import ssl
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpcore

from specdemo.core.errors import UserError, plain_text
from specdemo.remote.protocol import (
    CODECS,
    SESSION_HEADER,
    ErrorResponse,
    MessageT,
    NetworkMessage,
    PrefillPosition,
    ServiceIdentity,
    Unreadable,
    VerifyRequest,
)

_MAX_RESPONSE_BYTES, _MAX_LINE_BYTES = 16 << 20, 4096
_SLICE_S, _SLICE_BYTES = 0.5, 8192
_DAMAGED = 4  # most damaged responses in succession
_NETWORK_ERRORS = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, OSError)


class NoResponse(Exception):
    """No response in time; the request may be repeated."""


class RequestTimeout(NoResponse):
    """The service may be busy, frozen or disconnected."""


class ConnectionTimeout(RequestTimeout):
    """The host does not answer."""


class ServiceDown(NoResponse):
    """Connection refused or ended, or service stopped."""


class PromptReading(NoResponse):
    """`position` tokens of the text are read; the request must be repeated."""

    def __init__(self, sentence: str, position: int) -> None:
        super().__init__(sentence)
        self.position = position


class ServiceBusy(NoResponse):
    """Job queue full or rate limit reached."""


class ContextGone(Exception):
    """The service needs the complete text."""


class OtherModel(UserError):
    """The service has another model than the services of the run."""


class Unauthorised(UserError):
    """The bearer token is missing or wrong for the service at `url`."""

    def __init__(self, sentence: str, url: str) -> None:
        super().__init__(sentence)
        self.url = url


class RequestSuperseded(Exception):
    """Another client uses the context."""


def _failure(error: Exception) -> NoResponse:
    kind: type[NoResponse] = ServiceDown
    if isinstance(error, httpcore.TimeoutException):
        kind = ConnectionTimeout if isinstance(error, httpcore.ConnectTimeout) else RequestTimeout
    return kind(plain_text(str(error)) or type(error).__name__)


def other_model(url: str, identity: ServiceIdentity, expected: ServiceIdentity) -> OtherModel:
    model = "another model than" if identity.model else "a model without digest, unlike"
    return OtherModel(
        f"replica {identity.replica or 'without name'} at {url} serves {model} replica {expected.replica}: start every "
        "replica with the same target, dtype and quantization"
    )


class HttpClient:
    """Persistent connections to `url`."""

    def __init__(
        self,
        url: str,
        *,
        content_type: str = "application/json",
        token: str | None = None,
        session: str = "",
        network: MeteredNetwork | None = None,
    ) -> None:
        self.url, self.network = url.rstrip("/"), network or MeteredNetwork()
        self.identity = ServiceIdentity()  # stated by the service
        self._codec = CODECS[content_type]
        self._headers = {"Content-Type": content_type}
        self._headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._headers |= {SESSION_HEADER: session} if session else {}
        tls = ssl.create_default_context() if url.startswith("https:") else None  # respects SSL_CERT_FILE
        self._pool = httpcore.ConnectionPool(tls, network_backend=self.network, max_connections=4)
        self._repeats = 0  # damaged responses that are left

    def call(
        self, method: str, path: str, message: NetworkMessage | None, response_type: type[MessageT], timeout: float
    ) -> MessageT:
        """Send `message` and parse the response.

        Raises: NoResponse, ServiceBusy, ContextGone, RequestSuperseded, UserError.
        """
        try:
            with self._pool.stream(method, self.url + path, **self._options(message, timeout)) as response:
                content = self._content(response)
                if response.status == 200 and isinstance(message, VerifyRequest) and not message.base:
                    self._check_identity(response.headers)
        except _NETWORK_ERRORS as error:
            raise _failure(error) from error
        except httpcore.UnsupportedProtocol as error:
            raise UserError(f"{self.url} is no service address: use http://host:port") from error
        if response.status != 200:
            raise self._error(response.status, content)
        try:
            loaded = self._codec.load(response_type, content)
        except UserError as error:
            sentence = f"{self.url} is not a specdemo service of this version: {error}"
            raise (self._damaged(sentence) if isinstance(error, Unreadable) else UserError(sentence)) from error
        self._repeats = _DAMAGED
        return loaded

    def tokens(
        self, path: str, message: NetworkMessage, timeout: float
    ) -> Generator[int | PrefillPosition | None, None, None]:
        """Yield progress, token ids, then None; raise `NoResponse` if cut off."""
        try:
            with self._pool.stream("POST", self.url + path, **self._options(message, timeout)) as response:
                if response.status != 200:
                    raise self._error(response.status, self._content(response))
                self._check_identity(response.headers)
                rest = b""
                for chunk in response.iter_stream():
                    *lines, rest = (rest + chunk).split(b"\n")
                    if len(rest) > _MAX_LINE_BYTES:
                        raise ValueError("the line is too long")
                    for line in lines:
                        item = self._parsed(line)
                        yield item
                        if item is None:
                            return
        except _NETWORK_ERRORS as error:
            raise _failure(error) from error
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{self.url} is not a specdemo service: it sent no token ids") from error
        raise ServiceDown("the stream was cut off")

    def _parsed(self, line: bytes) -> int | PrefillPosition | None:
        """Return an item of `tokens`."""
        if line.startswith(b"error "):
            raise UserError(f"the cloud at {self.url} failed: {plain_text(line[6:].decode('utf-8', 'replace'))}")
        if line.startswith(b"read "):
            return PrefillPosition(int(line[5:]))
        return None if line == b"end" else int(line)

    def close(self) -> None:
        """End the reads of other threads within `_SLICE_S`."""
        self.network.limit = lambda: 0.0
        self._pool.close()

    def _check_identity(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            identity = ServiceIdentity.from_headers(headers)
        except ValueError as error:
            raise UserError(f"{self.url} is not a specdemo service: it sent no digest of its model") from error
        if self.identity.model and identity.model != self.identity.model:
            raise other_model(self.url, identity, self.identity)
        self.identity = identity

    def _content(self, response: httpcore.Response) -> bytes:
        content = bytearray()
        for chunk in response.iter_stream():
            content += chunk
            if len(content) > _MAX_RESPONSE_BYTES:
                raise UserError(f"{self.url} is not a specdemo service: its response is too large")
        return bytes(content)

    def _options(self, message: NetworkMessage | None, timeout: float) -> dict[str, Any]:
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout)
        body = b"" if message is None else self._codec.dump(message)
        return {"headers": self._headers, "content": body, "extensions": {"timeout": timeouts}}

    def _damaged(self, sentence: str) -> Exception:
        """Close connections, and repeat the request if the service has responded before."""
        self._pool.close()
        self._repeats -= 1
        return ServiceDown(sentence) if self._repeats >= 0 else UserError(sentence)

    def _error(self, status: int, body: bytes) -> Exception:
        try:
            problem = self._codec.load(ErrorResponse, body)
        except UserError:
            problem = ErrorResponse(error=f"status {status}", code="")
        if status == 401:
            return Unauthorised(f"the cloud at {self.url} rejected the request: {problem.error}", self.url)
        if status == 429:
            return ServiceBusy(problem.error)
        if problem.code == "unknown_context":
            return ContextGone(problem.error)
        if problem.code == "stale":
            return RequestSuperseded(problem.error)
        if problem.code == "prefill":
            return PromptReading(problem.error, problem.position)
        if status == 408 or (status == 503 and problem.code == "busy"):
            return NoResponse(problem.error)
        if status in (500, 502, 503, 504):
            return ServiceDown(problem.error)
        rejection = f"the cloud at {self.url} rejected the request: {problem.error}"
        if problem.code in ("", "unreadable"):
            return self._damaged(rejection)
        return UserError(rejection)


@dataclass(frozen=True)
class LinkEmulation:
    """Delay and loss added to the real link; lost messages time out."""

    rtt_s: float = 0.0
    loss: float = 0.0  # share of messages, each way
    seed: int = 0


@dataclass
class ByteCounts:
    """Traffic of HTTP messages with headers, without TCP and TLS."""

    up: int = 0
    down: int = 0
    up_s: float = 0.0  # includes emulated delay
    down_s: float = 0.0  # first to last byte of responses


@dataclass(eq=False)
class MeteredNetwork(httpcore.NetworkBackend):
    """Network that counts bytes and emulates a link; calls end after `limit()` seconds."""

    link: LinkEmulation = LinkEmulation()
    wait: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.perf_counter
    inner: httpcore.NetworkBackend = field(default_factory=httpcore.SyncBackend)
    counts: ByteCounts = field(default_factory=ByteCounts)
    limit: Callable[[], float] = lambda: math.inf

    def __post_init__(self) -> None:
        self._rng = random.Random(self.link.seed)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        timeout = self.bounded(timeout, httpcore.ConnectTimeout)
        stream = self.inner.connect_tcp(host, port, timeout, local_address, socket_options)
        self.pause(self.link.rtt_s)
        return MeteredStream(self, stream)

    def pause(self, seconds: float) -> None:
        """Wait at most `limit()` seconds."""
        if seconds:
            self.wait(max(0.0, min(seconds, self.limit())))

    def bounded(self, timeout: float | None, error: type[httpcore.TimeoutException]) -> float:
        left = min(math.inf if timeout is None else timeout, self.limit())
        if left <= 0:
            raise error("timed out")
        return left

    def is_lost(self) -> bool:
        return self._rng.random() < self.link.loss


class MeteredStream(httpcore.NetworkStream):
    """Connection; consecutive writes or consecutive reads form a message."""

    def __init__(self, network: MeteredNetwork, inner: httpcore.NetworkStream) -> None:
        self._network, self._inner = network, inner
        self._sending = self._dead = False

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        network = self._network
        start = network.clock()
        network.counts.up += len(buffer)
        if not self._sending:
            self._sending, self._dead = True, network.is_lost()
            network.pause(network.link.rtt_s / 2)
        for i in range(0, 0 if self._dead else len(buffer), _SLICE_BYTES):
            self._inner.write(buffer[i : i + _SLICE_BYTES], network.bounded(timeout, httpcore.WriteTimeout))
        network.counts.up_s += network.clock() - start

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Receive; raise `ReadTimeout` for lost and late messages."""
        network = self._network
        start = network.clock()
        first, self._sending = self._sending, False
        data = b"" if self._dead else self._read(max_bytes, math.inf if timeout is None else start + timeout)
        arrived = network.clock() if first else start
        delay = 0.0
        if first and not self._dead:
            self._dead = network.is_lost()
            delay = network.link.rtt_s / 2
        left = None if timeout is None else max(0.0, timeout - (network.clock() - start))
        if left is not None and (self._dead or delay > left):
            network.pause(left)
            raise httpcore.ReadTimeout("timed out")
        network.pause(delay)
        network.counts.down += len(data)
        network.counts.down_s += network.clock() - arrived
        return data

    def _read(self, max_bytes: int, end: float) -> bytes:
        while True:
            left = self._network.bounded(end - self._network.clock(), httpcore.ReadTimeout)
            try:
                return self._inner.read(max_bytes, min(left, _SLICE_S))
            except httpcore.ReadTimeout:
                continue

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> MeteredStream:
        """Count bytes before encryption."""
        timeout = self._network.bounded(timeout, httpcore.ReadTimeout)
        try:
            return MeteredStream(self._network, self._inner.start_tls(ssl_context, server_hostname, timeout))
        except httpcore.ConnectTimeout as error:  # the host has answered
            raise httpcore.ReadTimeout(str(error)) from error

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
