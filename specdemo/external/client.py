"""HTTP client of other engines: streamed texts, with the time of each event."""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import httpcore
from pydantic import BaseModel, ValidationError

from specdemo.core.errors import UserError, plain_text
from specdemo.external.address import KEY, EngineAddress, key_for
from specdemo.external.dialect import Dialect, Encode, RecordedEvent
from specdemo.external.llama_cpp import LlamaCpp
from specdemo.external.schema import Detokenized, GenerationRequest, Probe, ServedModels
from specdemo.external.sglang import Sglang
from specdemo.external.vllm import Vllm
from specdemo.remote.link import MAX_RESPONSE_BYTES, NETWORK_ERRORS, MeteredNetwork, read_content
from specdemo.worker import interruptible

DIALECTS: dict[str, Dialect] = {"llama.cpp": LlamaCpp(), "vllm": Vllm(), "sglang": Sglang()}
_SECONDS, _STREAM_SECONDS = 10.0, 300.0  # timeouts of short answers and of the next event
TOKENIZER_PROBE = "def naïve(x):\n    return '東京', x  # 🙂"
ResponseT = TypeVar("ResponseT", bound=BaseModel)


class EngineClient:
    """Connection to a server; `close` ends the reads of other threads."""

    def __init__(self, address: EngineAddress, key: str | None) -> None:
        self.address, self.dialect = address, DIALECTS[address.engine]
        self._network = MeteredNetwork()
        tls = ssl.create_default_context() if address.url.startswith("https:") else None
        self._pool = httpcore.ConnectionPool(tls, network_backend=self._network)
        self._headers: dict[bytes | str, bytes | str] = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def model(self) -> str:
        """Return the name of the served model."""
        return self.call("GET", "/v1/models", None, ServedModels).data[0].id

    def check_tokenizer(self, model: str, encode: Encode) -> None:
        """Raise `UserError` if the server decodes the ids of a text differently."""
        if not self.dialect.can_detokenize:
            return
        body = {"model": model, "tokens": list(encode(TOKENIZER_PROBE))}
        answer = self.call("POST", "/detokenize", body, Detokenized)
        if TOKENIZER_PROBE not in (answer.content or "", answer.prompt or ""):
            raise UserError(
                f"{self.address} has another tokenizer than the target: choose the pair whose target it serves"
            )

    def events(self, request: GenerationRequest, model: str) -> Generator[RecordedEvent]:
        """Yield the events of a streamed text. Raises `UserError`; closing the iterator ends the text."""
        queue: SimpleQueue[RecordedEvent | Exception | None] = SimpleQueue()
        closed = threading.Event()
        body = dict(self.dialect.body(request, model))
        threading.Thread(target=self._read, args=(body, queue, closed), daemon=True).start()
        try:
            while (item := interruptible(queue.get)) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            closed.set()

    def close(self) -> None:
        self._network.limit = lambda: 0.0
        self._pool.close()

    def _read(self, body: Any, queue: SimpleQueue[RecordedEvent | Exception | None], closed: threading.Event) -> None:
        start = time.perf_counter()
        try:
            with self._stream("POST", self.dialect.path, body, _STREAM_SECONDS) as response:
                if response.status != 200:
                    raise self._refusal(response)
                rest = b""
                for part in response.iter_stream():
                    *lines, rest = (rest + part).split(b"\n")
                    if closed.is_set() or len(rest) > MAX_RESPONSE_BYTES:
                        break
                    for line in lines:
                        event = line.removeprefix(b"data:").strip()
                        if line.startswith(b"data:") and event != b"[DONE]":
                            queue.put((time.perf_counter() - start, event.decode("utf-8", "replace")))
            queue.put(None)
        except NETWORK_ERRORS as error:
            queue.put(self._unreachable(error))
        except Exception as error:  # raised again by the reader of the queue
            queue.put(error)

    def call(self, method: str, path: str, body: Any, kind: type[ResponseT]) -> ResponseT:
        def call() -> bytes:
            with self._stream(method, path, body, _SECONDS) as response:
                if response.status != 200:
                    raise self._refusal(response)
                return read_content(response, self.address)

        try:
            return kind.model_validate_json(interruptible(call))
        except NETWORK_ERRORS as error:
            raise self._unreachable(error) from error
        except ValidationError as error:
            raise UserError(f"{self.address} gives no valid answer to {path}: check engine and address") from error

    def _stream(self, method: str, path: str, body: Any, seconds: float) -> Any:
        timeouts = {**dict.fromkeys(("connect", "write", "pool"), _SECONDS), "read": seconds}
        content = b"" if body is None else json.dumps(body).encode()
        url = self.address.url + path
        return self._pool.stream(method, url, headers=self._headers, content=content, extensions={"timeout": timeouts})

    def _refusal(self, response: httpcore.Response) -> UserError:
        if response.status in (401, 403):
            return UserError(f"{self.address} requires a key: set {KEY}")
        text = plain_text(read_content(response, self.address).decode("utf-8", "replace"), 200)
        return UserError(f"{self.address} refused the request (status {response.status}): {text}")

    def _unreachable(self, error: Exception) -> UserError:
        cause = plain_text(str(error)) or type(error).__name__
        return UserError(f"{self.address} does not answer ({cause}): start it, or correct the address")


def probe(server: str, tokens: Sequence[int]) -> Probe:
    """Return the most probable tokens of `ENGINE=URL` after `tokens`, none if it does not report them."""
    address = EngineAddress.parse(server)
    with closing(EngineClient(address, key_for(address, os.environ))) as client, suppress(UserError):
        body = {"model": client.model(), "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "logprobs": 2}
        return client.call("POST", "/v1/completions", body, Probe)
    return Probe()
