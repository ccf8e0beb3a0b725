"""Client of other engines: streamed texts with the time of each event, and runs as events of this program."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import PurePath
from queue import SimpleQueue
from typing import Annotated, Any, TypeVar

import httpcore
from pydantic import AliasChoices, AliasPath, Field, ValidationError

from specdemo.core.errors import UserError, plain_text
from specdemo.core.events import End, Event, Header, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.step import Step
from specdemo.external.address import KEY, EngineAddress, key_for
from specdemo.external.dialects import (
    DIALECTS,
    Encode,
    EndReason,
    EngineResponse,
    GenerationRequest,
    RecordedEvent,
    StepCounts,
    reported_step,
)
from specdemo.models.tokenizer import TextStream, check_ids, stop_texts
from specdemo.remote.link import MAX_RESPONSE_BYTES, NETWORK_ERRORS, MeteredNetwork, read_content
from specdemo.worker import interruptible, run_in_thread

_SECONDS, _STREAM_SECONDS = 10.0, 300.0  # timeouts of short answers and of the next event
TOKENIZER_PROBE = "def naïve(x):\n    return '東京', x  # 🙂"
ResponseT = TypeVar("ResponseT", bound=EngineResponse)


class ServedModel(EngineResponse):
    """First entry of /v1/models."""

    id: Annotated[str, Field(max_length=400, validation_alias=AliasPath("data", 0, "id"))]


class Detokenized(EngineResponse):
    """Answer of /detokenize, of llama.cpp or vLLM."""

    text: str = Field("", validation_alias=AliasChoices("content", "prompt"))


class LlamaLogprob(EngineResponse):
    """Log-probability of a token."""

    logprob: float


class ReportedTopTokens(EngineResponse):
    """Answer of /v1/completions with the most probable tokens: a list of llama.cpp, or a mapping of other engines."""

    system_fingerprint: str | None = None
    top: Annotated[
        list[LlamaLogprob] | dict[str, float],
        Field(
            validation_alias=AliasChoices(
                AliasPath("choices", 0, "logprobs", "top_logprobs", 0),
                AliasPath("choices", 0, "logprobs", "content", 0, "top_logprobs"),
            )
        ),
    ] = []

    @property
    def margin(self) -> float | None:
        """Return the difference of the two largest log-probabilities; None if they are not reported."""
        values = self.top.values() if isinstance(self.top, dict) else [token.logprob for token in self.top]
        largest = sorted(values, reverse=True)[:2]
        return largest[0] - largest[1] if len(largest) == 2 else None


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
        return self.call("GET", "/v1/models", None, ServedModel).id

    def check_tokenizer(self, model: str, encode: Encode) -> None:
        """Raise `UserError` if the server decodes the ids of a text differently."""
        if not self.dialect.can_detokenize:
            return
        body = {"model": model, "tokens": list(encode(TOKENIZER_PROBE))}
        answer = self.call("POST", "/detokenize", body, Detokenized)
        if answer.text != TOKENIZER_PROBE:
            raise UserError(
                f"{self.address} has another tokenizer than the target: choose the pair whose target it serves"
            )

    def events(self, request: GenerationRequest, model: str) -> Iterator[RecordedEvent]:
        """Yield the events of a streamed text, which `close` ends. Raises `UserError`."""
        queue: SimpleQueue[RecordedEvent | None] = SimpleQueue()
        reader = run_in_thread(partial(self._read, dict(self.dialect.body(request, model)), queue))
        while (item := interruptible(queue.get)) is not None:
            yield item
        reader.result()

    def close(self) -> None:
        self._network.limit = lambda: 0.0
        self._pool.close()

    def _read(self, body: Any, queue: SimpleQueue[RecordedEvent | None]) -> None:
        start = time.perf_counter()
        try:
            with self._response("POST", self.dialect.path, body, _STREAM_SECONDS) as response:
                rest = b""
                for part in response.iter_stream():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        event = line.removeprefix(b"data:").strip()
                        if line.startswith(b"data:") and event != b"[DONE]":
                            queue.put((time.perf_counter() - start, event.decode("utf-8", "replace")))
                    if len(rest) > MAX_RESPONSE_BYTES:
                        break
        finally:
            queue.put(None)

    def call(self, method: str, path: str, body: Any, kind: type[ResponseT]) -> ResponseT:
        def call() -> bytes:
            with self._response(method, path, body, _SECONDS) as response:
                return read_content(response, self.address)

        try:
            return kind.model_validate_json(interruptible(call))
        except ValidationError as error:
            raise UserError(f"{self.address} gives no valid answer to {path}: check engine and address") from error

    @contextmanager
    def _response(self, method: str, path: str, body: Any, seconds: float) -> Iterator[httpcore.Response]:
        timeouts = {**dict.fromkeys(("connect", "write", "pool"), _SECONDS), "read": seconds}
        content = b"" if body is None else json.dumps(body).encode()
        url = self.address.url + path
        try:
            with self._pool.stream(
                method, url, headers=self._headers, content=content, extensions={"timeout": timeouts}
            ) as response:
                if response.status in (401, 403):
                    raise UserError(f"{self.address} requires a key: set {KEY}")
                if response.status != 200:
                    text = plain_text(read_content(response, self.address).decode("utf-8", "replace"), 200)
                    raise UserError(f"{self.address} refused the request (status {response.status}): {text}")
                yield response
        except NETWORK_ERRORS as error:
            cause = plain_text(str(error)) or type(error).__name__
            raise UserError(f"{self.address} does not answer ({cause}): start it, or correct the address") from error


def top_tokens_of(server: str, tokens: Sequence[int]) -> ReportedTopTokens:
    """Return the most probable tokens of `ENGINE=URL` after `tokens`, none if it does not report them."""
    address = EngineAddress.parse(server)
    with closing(EngineClient(address, key_for(address, os.environ))) as client, suppress(UserError):
        body = {"model": client.model(), "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "logprobs": 2}
        return client.call("POST", "/v1/completions", body, ReportedTopTokens)
    return ReportedTopTokens()


@dataclass(frozen=True)
class ExternalRun:
    """A request to a server, and the tokenizer of the served target."""

    client: EngineClient
    request: GenerationRequest
    tokenizer: Any
    stop_texts: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()

    def events(self, recipe: Mapping[str, Any], prompt: str, environment: Mapping[str, Any]) -> Iterator[Event]:
        """Yield header, steps and end. Raises `UserError` before the header."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        model = self.client.model()
        self.client.check_tokenizer(model, encode)
        yield Header(
            recipe=recipe,
            prompt=prompt,
            prompt_tokens=tuple(self.request.prompt),
            vocab_size=len(self.tokenizer),
            exact=False,
            environment={
                **environment,
                "engine": f"{self.client.address.engine} server: {plain_text(PurePath(model).name)}",
            },
        )
        metrics, reason = Metrics(), "stop"
        received = self.client.events(self.request, model)
        try:
            for event, ended in self._texts(self.client.dialect.steps(received, encode)):
                metrics, reason = event.metrics, ended or reason
                yield event
            yield End(reason, None, metrics)
        except UserError as error:
            yield End("error", str(error), metrics)
        except ValueError as error:
            cause = plain_text(str(error))
            yield End("error", f"{self.client.address} sent an event that this program cannot read: {cause}", metrics)

    def _texts(self, steps: Iterator[Step | EndReason]) -> Iterator[tuple[StepEvent, EndReason | None]]:
        """Yield the steps with their texts, the last one with the reason of the end."""
        stream = TextStream(self.tokenizer, self.request.prompt)
        stops = stop_texts(self.tokenizer, self.stop_texts)
        metrics = Metrics()
        for step, following in pairwise(steps):
            assert isinstance(step, Step)  # the reason is the last item
            reason = None if isinstance(following, Step) else following
            check_ids(list(step.tokens), len(self.tokenizer))
            tokens = step.tokens[: self.request.max_tokens - metrics.tokens]
            if metrics.tokens + len(tokens) == self.request.max_tokens:
                reason = reason or "length"
            if stopped := next((n for n, token in enumerate(tokens, 1) if token in self.stop_tokens), None):
                tokens, reason = tokens[:stopped], "stop"
            pieces = [stream.push(token) + stops.mark(token) for token in tokens]
            if reason:
                pieces[-1] += stream.flush()
            pieces = stops.feed(pieces, bool(reason))
            if stops.reached:
                reason = "stop"
            counts = StepCounts(step.accepted, step.draft.size) if step.verified else None
            step = reported_step(step.i, step.t, tokens[: len(pieces)], counts)
            metrics = metrics.plus(step)
            yield StepEvent(step, tuple(pieces), tuple(pieces[: len(step.draft)]), metrics=metrics), reason
            if reason:
                return
