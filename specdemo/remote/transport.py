"""Messages over HTTP, on connections that are kept: one call, one answer, or one of four reasons why there is none."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import TypeVar

import httpcore

from specdemo.core.errors import UserError
from specdemo.remote.link import LinkEmulation, MeteredNetwork
from specdemo.remote.protocol import ENCODINGS, ErrorResponse, WireMessage

M = TypeVar("M", bound=WireMessage)


class NoResponse(Exception):
    """No answer came, or not in time: the same message may be sent again."""


class ServiceBusy(NoResponse):
    """The cloud has too much to do."""


class ContextGone(Exception):
    """The cloud does not hold the text."""


class RequestSuperseded(Exception):
    """Somebody else has the context."""


class HttpClient:
    """The service at `url`. `kind` is the encoding's content type; bytes are counted in `wire.tally`."""

    def __init__(
        self, url: str, *, kind: str = "application/json", token: str | None = None, link: LinkEmulation | None = None
    ) -> None:
        self.url, self.wire = url.rstrip("/"), MeteredNetwork(link)
        self._kind, self._encoding = kind, ENCODINGS[kind]
        self._headers = {"Content-Type": kind, **({"Authorization": f"Bearer {token}"} if token else {})}
        trust = ssl.create_default_context() if url.startswith("https:") else None  # the system's, or SSL_CERT_FILE's
        self._pool = httpcore.ConnectionPool(trust, network_backend=self.wire, max_connections=4)

    def call(self, method: str, path: str, message: WireMessage | None, answer: type[M], timeout: float) -> M:
        """Send `message`, parse the answer. Raises `Unanswered` and the others above, or `UserError` with the reason."""
        body = b"" if message is None else self._encoding.dump(message)
        try:
            response = self._pool.request(
                method, self.url + path, headers=self._headers, content=body, extensions=_timeouts(timeout)
            )
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise NoResponse(str(error) or type(error).__name__) from error
        except httpcore.UnsupportedProtocol as error:
            raise UserError(f"{self.url} is no address of a service: give http://host:port") from error
        if response.status != 200:
            raise self._trouble(response.status, response.content)
        try:
            return self._encoding.load(answer, response.content)
        except UserError as error:
            raise UserError(f"{self.url} does not answer as a specdemo service does: {error}") from error

    def tokens(self, path: str, message: WireMessage, timeout: float) -> Iterator[int | None]:
        """Token ids of a streamed answer as they come, then None; `Unanswered` where the stream is cut off."""
        body = self._encoding.dump(message)
        try:
            with self._pool.stream(
                "POST", self.url + path, headers=self._headers, content=body, extensions=_timeouts(timeout)
            ) as response:
                if response.status != 200:
                    raise self._trouble(response.status, response.read())
                rest = b""
                for chunk in response.iter_stream():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line.startswith(b"error "):
                            raise UserError(f"the cloud at {self.url} stopped: {line[6:].decode()}")
                        yield None if line == b"end" else int(line)
                        if line == b"end":
                            return
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise NoResponse(str(error) or type(error).__name__) from error
        except ValueError as error:
            raise UserError(f"{self.url} does not answer as a specdemo service does: it sent no token ids") from error
        raise NoResponse("the stream was cut off")

    def close(self) -> None:
        """Hang up."""
        self._pool.close()

    def _trouble(self, status: int, body: bytes) -> Exception:
        try:
            problem = self._encoding.load(ErrorResponse, body)
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
        return UserError(f"the cloud at {self.url} refused: {problem.error}")


def _timeouts(seconds: float) -> dict[str, dict[str, float]]:
    return {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), seconds)}
