"""HTTP client of a cloud service, the errors of its requests, and measurements and emulation of the link."""

from __future__ import annotations

import math
import random
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import httpcore

from specdemo.core.errors import UserError, plain_text
from specdemo.core.step import LinkStats
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

MAX_RESPONSE_BYTES = 16 << 20
_MAX_LINE_BYTES = 4096
_SLICE_S = 0.5
_SLICE_BYTES = 8192
NETWORK_ERRORS = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, OSError)


class Cause(Enum):
    """Reason to repeat a request."""

    LATE = auto()  # the service may be busy, frozen or disconnected
    UNREACHABLE = auto()  # the host does not answer
    DOWN = auto()  # connection refused or ended, or service stopped
    BUSY = auto()  # job queue full, rate limit reached, context in use, or a part of the text is read


class Retry(Exception):
    """The request may be repeated; `position`: tokens of the text that are read."""

    def __init__(self, sentence: str, cause: Cause = Cause.BUSY, position: int = 0) -> None:
        super().__init__(sentence)
        self.cause = cause
        self.position = position


class ResendText(Exception):
    """The service needs the complete text."""


class NewContext(Exception):
    """Another client uses the context."""


class OtherModel(UserError):
    """The service has another model than the services of the run."""

    def __init__(self, url: str, identity: ServiceIdentity, expected: ServiceIdentity) -> None:
        super().__init__(
            f"replica {identity.replica or 'without name'} at {url} states another model than replica "
            f"{expected.replica}, or none: start every replica with the same target, dtype and quantization"
        )


_CHANGES = {"unknown_context": ResendText, "stale": NewContext}  # by code of the response


def read_content(response: httpcore.Response, source: object) -> bytes:
    """Return a body. Raises `UserError` above `MAX_RESPONSE_BYTES`."""
    content = bytearray()
    for chunk in response.iter_stream():
        content += chunk
        if len(content) > MAX_RESPONSE_BYTES:
            raise UserError(f"a response of {source} is too large: check the address")
    return bytes(content)


class HttpClient:
    """Persistent connections to `url`; `refusal` is added to the sentence about a wrong token."""

    def __init__(
        self,
        url: str,
        *,
        content_type: str = "application/json",
        token: str | None = None,
        session: str = "",
        network: MeteredNetwork | None = None,
        refusal: str = "",
    ) -> None:
        self.url = url.rstrip("/")
        self.network = network or MeteredNetwork()
        self.identity = ServiceIdentity()  # stated by the service
        self._has_responded = False
        self._refusal = refusal
        self._codec = CODECS[content_type]
        self._headers: dict[bytes | str, bytes | str] = {"Content-Type": content_type}
        self._headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._headers |= {SESSION_HEADER: session} if session else {}
        tls = ssl.create_default_context() if url.startswith("https:") else None  # respects SSL_CERT_FILE
        self._pool = httpcore.ConnectionPool(tls, network_backend=self.network, max_connections=4)

    def call(
        self, method: str, path: str, message: NetworkMessage | None, response_type: type[MessageT], timeout: float
    ) -> MessageT:
        """Send `message` and parse the response. Raises: Retry, ResendText, NewContext, UserError."""
        with self._response(method, path, message, timeout) as response:
            content = read_content(response, self.url)
            if response.status != 200:
                raise self._error(response.status, content)
            if isinstance(message, VerifyRequest) and not message.base:
                self._check_identity(response.headers)
        try:
            loaded = self._codec.load(response_type, content)
        except UserError as error:
            sentence = f"{self.url} is not a specdemo service of this version: {error}"
            raise (self._damaged(sentence) if isinstance(error, Unreadable) else UserError(sentence)) from error
        self._has_responded = True
        return loaded

    def tokens(
        self, path: str, message: NetworkMessage, timeout: float
    ) -> Generator[int | PrefillPosition | None, None, None]:
        """Yield progress, token ids, then None; raise `Retry` if cut off."""
        with self._response("POST", path, message, timeout) as response:
            if response.status != 200:
                raise self._error(response.status, read_content(response, self.url))
            self._check_identity(response.headers)
            rest = b""
            for chunk in response.iter_stream():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    item = self._item(line)
                    yield item
                    if item is None:
                        return
                if len(rest) > _MAX_LINE_BYTES:
                    raise UserError(f"{self.url} is not a specdemo service: it sent no token ids")
        raise Retry("the stream was cut off", Cause.DOWN)

    def close(self) -> None:
        """End the reads of other threads within `_SLICE_S`."""
        self.network.limit = lambda: 0.0
        self._pool.close()

    @contextmanager
    def _response(
        self, method: str, path: str, message: NetworkMessage | None, timeout: float
    ) -> Iterator[httpcore.Response]:
        network = self.network
        body = b"" if message is None else self._codec.dump(message)
        if message is not None:
            network.measures["sent"] += 1
        extensions = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), timeout)}
        try:
            network.delay(timeout + network.rtt_s / 2)
            with self._pool.stream(
                method, self.url + path, headers=self._headers, content=body, extensions=extensions
            ) as response:
                network.delay(timeout - (network.clock() - network.written))
                arrived = network.clock()
                yield response
                network.measures["down_s"] += network.clock() - arrived
        except NETWORK_ERRORS as error:
            cause = Cause.LATE if isinstance(error, httpcore.TimeoutException) else Cause.DOWN
            cause = Cause.UNREACHABLE if isinstance(error, httpcore.ConnectTimeout) else cause
            raise Retry(plain_text(str(error)) or type(error).__name__, cause) from error
        except httpcore.UnsupportedProtocol as error:
            raise UserError(f"{self.url} is no service address: use http://host:port") from error

    def _item(self, line: bytes) -> int | PrefillPosition | None:
        """Parse a line of `tokens`."""
        if line.startswith(b"error "):
            raise UserError(f"the cloud at {self.url} failed: {plain_text(line[6:].decode('utf-8', 'replace'))}")
        if line == b"end":
            return None
        try:
            return PrefillPosition(int(line[5:])) if line.startswith(b"read ") else int(line)
        except ValueError as error:
            raise UserError(f"{self.url} is not a specdemo service: it sent no token ids") from error

    def _check_identity(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            identity = ServiceIdentity.from_headers(headers)
        except ValueError as error:
            raise UserError(f"{self.url} is not a specdemo service: it sent no digest of its model") from error
        if self.identity.model and identity.model != self.identity.model:
            raise OtherModel(self.url, identity, self.identity)
        self.identity = identity

    def _damaged(self, sentence: str) -> Exception:
        """Close connections, and repeat the request if the service has responded before."""
        self._pool.close()
        return Retry(sentence, Cause.DOWN) if self._has_responded else UserError(sentence)

    def _error(self, status: int, body: bytes) -> Exception:
        try:
            problem = self._codec.load(ErrorResponse, body)
        except UserError:
            problem = ErrorResponse(error=f"status {status}", code="")
        if problem.code in _CHANGES:
            return _CHANGES[problem.code](problem.error)
        if status in (408, 429) or (status == 503 and problem.code in ("busy", "prefill")):
            return Retry(problem.error, Cause.BUSY, problem.position)
        if status in (500, 502, 503, 504):
            return Retry(problem.error, Cause.DOWN)
        refusal = self._refusal if status == 401 else ""
        rejection = f"the cloud at {self.url} rejected the request: {problem.error}{refusal}"
        return self._damaged(rejection) if problem.code in ("", "unreadable") else UserError(rejection)


def _no_measures() -> defaultdict[str, float]:
    """Return counters by names of `LinkStats`. Bytes exclude TCP and TLS; `down_s` starts at the first byte."""
    return defaultdict(float, dict.fromkeys(("bytes_up", "bytes_down", "up_s", "down_s"), 0.0))


@dataclass(eq=False)
class MeteredNetwork(httpcore.NetworkBackend):
    """Network that measures the requests of a step; calls end after `limit()` seconds.

    It adds delay and loss of requests and responses to the real link; lost messages time out.
    """

    rtt_s: float = 0.0
    loss: float = 0.0  # share of messages, each way
    seed: int = 0
    wait: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.perf_counter
    inner: httpcore.NetworkBackend = field(default_factory=httpcore.SyncBackend)
    limit: Callable[[], float] = lambda: math.inf

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self.written = 0.0  # time of the last write
        self.measures = _no_measures()
        self.replica = ""  # name of the service, if it changed

    def take(self, **counts: float) -> tuple[LinkStats, str]:
        """Return the measurements since the last call, with `counts`, and the name of the service if it changed."""
        taken = LinkStats.of(self.measures | counts), self.replica
        self.measures = _no_measures()
        self.replica = ""
        return taken

    def delay(self, left: float) -> None:
        """Delay a message; raise `ReadTimeout` after `left` seconds if it is lost or arrives later."""
        seconds = self.rtt_s / 2
        late = self._rng.random() < self.loss or seconds > max(0.0, left)
        self._pause(left if late else seconds)
        if late:
            raise httpcore.ReadTimeout("timed out")

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
        self._pause(self.rtt_s)
        return MeteredStream(self, stream)

    def bounded(self, timeout: float | None, error: type[httpcore.TimeoutException]) -> float:
        left = min(math.inf if timeout is None else timeout, self.limit())
        if left <= 0:
            raise error("timed out")
        return left

    def _pause(self, seconds: float) -> None:
        if seconds:
            self.wait(max(0.0, min(seconds, self.limit())))


class MeteredStream(httpcore.NetworkStream):
    """Connection whose bytes are counted before encryption."""

    def __init__(self, network: MeteredNetwork, inner: httpcore.NetworkStream) -> None:
        self._network = network
        self._inner = inner

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        network = self._network
        start = network.clock()
        network.measures["bytes_up"] += len(buffer)
        for i in range(0, len(buffer), _SLICE_BYTES):
            self._inner.write(buffer[i : i + _SLICE_BYTES], network.bounded(timeout, httpcore.WriteTimeout))
        network.written = network.clock()
        network.measures["up_s"] += network.written - start

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        network = self._network
        end = math.inf if timeout is None else network.clock() + timeout
        while True:
            left = network.bounded(end - network.clock(), httpcore.ReadTimeout)
            try:
                data = self._inner.read(max_bytes, min(left, _SLICE_S))
            except httpcore.ReadTimeout:
                continue
            network.measures["bytes_down"] += len(data)
            return data

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> MeteredStream:
        timeout = self._network.bounded(timeout, httpcore.ReadTimeout)
        try:
            return MeteredStream(self._network, self._inner.start_tls(ssl_context, server_hostname, timeout))
        except httpcore.ConnectTimeout as error:  # the host has answered
            raise httpcore.ReadTimeout(str(error)) from error

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
