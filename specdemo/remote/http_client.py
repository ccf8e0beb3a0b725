"""HTTP client of the cloud service."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import httpcore

from specdemo.core.errors import UserError
from specdemo.remote.link import LinkEmulation, MeteredNetwork
from specdemo.remote.protocol import CODECS, ErrorResponse, MessageT, NetworkMessage

_NETWORK_ERRORS = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, OSError)


class NoResponse(Exception):
    """No response in time; the request may be repeated."""


class ServiceBusy(NoResponse):
    """Job queue full or rate limit reached."""


class ContextGone(Exception):
    """The service needs the complete text."""


class RequestSuperseded(Exception):
    """Another client uses the context."""


class HttpClient:
    """Persistent connections to `url`."""

    def __init__(
        self,
        url: str,
        *,
        content_type: str = "application/json",
        token: str | None = None,
        link: LinkEmulation | None = None,
    ) -> None:
        self.url, self.network = url.rstrip("/"), MeteredNetwork(link)
        self._codec = CODECS[content_type]
        self._headers = {"Content-Type": content_type, **({"Authorization": f"Bearer {token}"} if token else {})}
        tls = ssl.create_default_context() if url.startswith("https:") else None  # respects SSL_CERT_FILE
        self._pool = httpcore.ConnectionPool(tls, network_backend=self.network, max_connections=4)

    def call(
        self, method: str, path: str, message: NetworkMessage | None, response_type: type[MessageT], timeout: float
    ) -> MessageT:
        """Send `message` and parse the response.

        Raises: NoResponse, ServiceBusy, ContextGone, RequestSuperseded, UserError.
        """
        try:
            response = self._pool.request(method, self.url + path, **self._options(message, timeout))
        except _NETWORK_ERRORS as error:
            raise NoResponse(str(error) or type(error).__name__) from error
        except httpcore.UnsupportedProtocol as error:
            raise UserError(f"{self.url} is no service address: use http://host:port") from error
        if response.status != 200:
            raise self._error(response.status, response.content)
        try:
            return self._codec.load(response_type, response.content)
        except UserError as error:
            raise UserError(f"{self.url} is not a specdemo service of this version: {error}") from error

    def tokens(self, path: str, message: NetworkMessage, timeout: float) -> Iterator[int | None]:
        """Yield token ids, then None; raise `NoResponse` if cut off."""
        try:
            with self._pool.stream("POST", self.url + path, **self._options(message, timeout)) as response:
                if response.status != 200:
                    raise self._error(response.status, response.read())
                rest = b""
                for chunk in response.iter_stream():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line.startswith(b"error "):
                            raise UserError(f"the cloud at {self.url} failed: {line[6:].decode()}")
                        yield None if line == b"end" else int(line)
                        if line == b"end":
                            return
        except _NETWORK_ERRORS as error:
            raise NoResponse(str(error) or type(error).__name__) from error
        except ValueError as error:
            raise UserError(f"{self.url} is not a specdemo service: it sent no token ids") from error
        raise NoResponse("the stream was cut off")

    def close(self) -> None:
        self._pool.close()

    def _options(self, message: NetworkMessage | None, timeout: float) -> dict:
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout)
        body = b"" if message is None else self._codec.dump(message)
        return {"headers": self._headers, "content": body, "extensions": {"timeout": timeouts}}

    def _error(self, status: int, body: bytes) -> Exception:
        try:
            problem = self._codec.load(ErrorResponse, body)
        except UserError:
            problem = ErrorResponse(error=f"status {status}", code="")
        if status == 429:
            return ServiceBusy(problem.error)
        if problem.code == "unknown_context":
            return ContextGone(problem.error)
        if problem.code == "stale":
            return RequestSuperseded(problem.error)
        if status in (408, 500, 502, 503, 504):
            return NoResponse(problem.error)
        return UserError(f"the cloud at {self.url} rejected the request: {problem.error}")
