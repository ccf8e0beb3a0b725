"""Edge and cloud in the same process, with the real codecs."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from fakes.enumeration import PROMPT, SMALL, TARGET, VOCAB
from fakes.tiny_models import Explorer, committed, run
from specdemo.core.decode import EmptyDrafter
from specdemo.core.policies import Fixed
from specdemo.core.rules import match
from specdemo.core.sampling import SamplingParams, SharedNoise
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ModelDrafter
from specdemo.remote.client import RemoteVerifier, StreamingVerifier
from specdemo.remote.connection import Connection
from specdemo.remote.contexts import Contexts, StaleRequest, UnknownContext
from specdemo.remote.link import MeteredNetwork, NewContext, ResendText
from specdemo.remote.protocol import (
    CODECS,
    NetworkMessage,
    ServiceIdentity,
    ServiceInfo,
    VerifyConfig,
    VerifyRequest,
    VerifyResponse,
    digest,
)

T = TypeVar("T")
INFO = ServiceInfo(
    name="table",
    vocab_size=VOCAB,
    context=64,
    stop=[3],
    tokenizer="",
    engine="table",
    dtype="float32",
    device="cpu",
    threads=1,
    weight_bytes=0,
    bit_equal=True,
)
OPEN = {"ctx_id": "a", "round": 0, "base": 0, "k": 0, "tokens": [2, 0, 2, 0], "sampling_cfg": {"temp": 1.0}}
DRAFTED = {**OPEN, "k": 2, "draft_tokens": [1, 2], "q_token_probs": [0.5, 0.5]}


class TableCache:
    """Stateless scoring cache around the table model."""

    reserved_bytes = 100

    def __init__(self, score: Callable[[Sequence[int], Any], torch.Tensor] = TARGET.score) -> None:
        self.score, self.closed = score, False

    def drop_recordings(self) -> None:
        pass

    def prefill(self, tokens: Sequence[int]) -> Iterator[int]:
        return iter(())

    def close(self) -> None:
        self.closed = True


def contexts(score: Callable[[Sequence[int], Any], torch.Tensor] = TARGET.score, **options: Any) -> Contexts:
    return Contexts(partial(TableCache, score), **{"vocab_size": VOCAB, "context": 64, **options})


def response_of(cloud: Contexts, request: VerifyRequest) -> VerifyResponse:
    """Verify a draft without progress of the prefill."""
    *_, response = cloud.verify(request)
    assert isinstance(response, VerifyResponse)
    return response


class DirectClient:
    """`HttpClient` without a network: encode and decode messages, then call the contexts."""

    url, identity = "direct", ServiceIdentity()

    def __init__(self, cloud: Contexts, kind: str = "application/msgpack") -> None:
        self.cloud, self.network, self.codec = cloud, MeteredNetwork(), CODECS[kind]
        self.sent: list[VerifyRequest] = []
        self.responses: list[NetworkMessage] = []

    def call(self, method: str, path: str, message: NetworkMessage | None, kind: type[NetworkMessage], _: float) -> Any:
        if message is None:
            return kind(deleted=self.cloud.delete(path.rpartition("/")[2]))
        return self.exchange(message, kind)

    def exchange(self, message: Any, kind: type[NetworkMessage]) -> Any:
        """Send a request; subclasses inject faults here."""
        body = self.codec.dump(message)
        self.network.measures["bytes_up"] += len(body)
        self.network.measures["sent"] += 1
        self.sent.append(self.codec.load(VerifyRequest, body))
        try:
            body = self.codec.dump(response_of(self.cloud, self.sent[-1]))
        except UnknownContext as error:
            raise ResendText(str(error)) from error
        except StaleRequest as error:
            raise NewContext(str(error)) from error
        self.network.measures["bytes_down"] += len(body)
        self.responses.append(self.codec.load(kind, body))
        return self.responses[-1]

    def close(self) -> None: ...


class RepeatableNoise:
    """Exploring noise source that repeats its values per position, as keyed noise does."""

    def __init__(self, explorer: Explorer, position: int, values: dict[Any, Any]) -> None:
        self.explorer, self.position, self.values, self.count = explorer, position, values, 0

    def _repeat(self, draw: Callable[[], Any]) -> Any:
        key = (self.position, self.count)
        self.count += 1
        if key not in self.values:
            self.values[key] = draw()
        return self.values[key]

    def test(self, probability: float) -> tuple[bool, float]:
        return self._repeat(lambda: self.explorer.test(probability))

    def sample(self, probs: torch.Tensor, position: int = 0) -> int:
        return self._repeat(lambda: self.explorer.sample(probs))


def verify_config(
    sampling: SamplingParams, rule: str = "rejection", seed: int = 0, adjust: bool = True
) -> VerifyConfig:
    return VerifyConfig(
        **sampling.numbers,
        bad_words=[list(word) for word in sampling.bad_words],
        seed=seed,
        rule=rule,
        adjust=adjust,
    )


class InlineConnection(Connection):
    """Connection whose calls run in the thread of the caller."""

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        return future


def connection(http: Any, **options: Any) -> Connection:
    """Return a connection to the client `http`; `options`: clock and sleep."""
    return http if isinstance(http, Connection) else Connection([http], **options)


def remote_verifier(http: Any, config: VerifyConfig, **options: Any) -> RemoteVerifier:
    """Verify with the client or connection `http`; `options` also of the connection."""
    times = {name: options.pop(name) for name in ("clock", "sleep") if name in options}
    return RemoteVerifier(connection(http, **times), config, **options)


def streaming_verifier(http: Any, *arguments: Any, **options: Any) -> StreamingVerifier:
    """Stream with the client or connection `http`; `options` also of the connection."""
    times = {name: options.pop(name) for name in ("clock", "sleep") if name in options}
    return StreamingVerifier(connection(http, **times), *arguments, **options)


COUPLED = verify_config(SamplingParams(), "coupled", seed=7)
LONG = 40


def context_request(**changes: Any) -> VerifyRequest:
    """Return a request that opens the context "a" with a text of two tokens, unless changed."""
    opening = {"context_id": "a", "step": 0, "base": 0, "k": 0, "tokens": [2, 0], "config": COUPLED}
    return VerifyRequest(**{**opening, **changes})


def later_request(text: Sequence[int], step: int, **changes: Any) -> VerifyRequest:
    """Return a request that continues a context with this text."""
    later = {"step": step, "base": len(text), "digest": digest(text), "tokens": [], "config": None}
    return context_request(**{**later, **changes})


def decode_coupled(http: Any, seed: int = 7, max_tokens: int = LONG, **options: Any) -> Any:
    """Decode with rule coupled at temperature 1."""
    drafter = ModelDrafter(SMALL.score, SamplingParams(), SharedNoise(seed), VOCAB)
    config = verify_config(SamplingParams(), "coupled", seed)
    verifier = remote_verifier(http, config, **{"sleep": lambda seconds: None, **options})
    return run(PROMPT, verifier, drafter, Fixed(3), max_tokens)


def decode_locally(seed: int = 7, max_tokens: int = LONG) -> list[int]:
    """Decode autoregressively without the cloud, with the same noise."""
    return committed(
        run(
            PROMPT,
            ModelVerifier(TARGET.score, SamplingParams(), match, SharedNoise(seed), SharedNoise(seed)),
            EmptyDrafter(),
            Fixed(1),
            max_tokens,
        )
    )
