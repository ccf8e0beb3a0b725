"""Edge and cloud of the table model: in the same process with the real codecs, over HTTP, and hostile messages."""

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st

from fakes.enumeration import PROMPT, SMALL, TARGET, VOCAB
from fakes.http_server import Handler, http_server
from fakes.services import listening
from fakes.tiny_models import Explorer, committed, run
from specdemo.core.decode import EmptyDrafter
from specdemo.core.policies import Fixed
from specdemo.core.rules import RULES, match
from specdemo.core.sampling import SamplingParams, SharedNoise
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ModelDrafter
from specdemo.models.load import read_tokenizer
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import PAIRS, fingerprint
from specdemo.remote.admission import ServiceOptions
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
from specdemo.remote.server import create_app
from specdemo.remote.target import RemoteVerifier, StreamingVerifier
from specdemo.worker import Worker

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
    return http if isinstance(http, Connection) else Connection([http], **options)


def remote_verifier(http: Any, config: VerifyConfig, **options: Any) -> RemoteVerifier:
    times = {name: options.pop(name) for name in ("clock", "sleep") if name in options}
    return RemoteVerifier(connection(http, **times), config, **options)


def streaming_verifier(http: Any, *arguments: Any, **options: Any) -> StreamingVerifier:
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


MODEL, NUMERICS = "a" * 32, "b" * 32


@contextmanager
def table_service(cloud: Contexts | None = None, token: str | None = None, **changes: Any) -> Iterator[str]:
    """Yield the address of a service with `changes` of its description."""
    info = INFO.model_copy(update={"model": MODEL, "numerics": NUMERICS, "replica": "first", **changes})
    app = create_app(info, contexts() if cloud is None else cloud, Worker(), ServiceOptions(token))
    with listening(app) as address:
        yield "http://{}:{}".format(*address)


Respond = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]  # request -> status and body


def bundled_info(**changes: Any) -> dict[str, Any]:
    """Return the description of a service with the bundled target."""
    tokenizer = read_tokenizer(ModelSpec(PAIRS["bundled"].target, device="cpu"))
    info = {**json.loads(INFO.model_dump_json()), "tokenizer": fingerprint(tokenizer), "context": 512}
    return {**info, "vocab_size": len(tokenizer), **changes}


def rejection(request: dict[str, Any], token: int) -> dict[str, Any]:
    """Return a response that commits `token` and no draft token."""
    n = len(request.get("draft_tokens", ()))
    fields = {"epoch": request.get("epoch", 0), "round": request["round"], "accepted_len": 0, "p": [0.5] * n}
    return {**fields, "correction" if n else "bonus": token, "choices": [[token]] * (n + 1)}


@contextmanager
def hostile_service(respond: Respond, **changes: Any) -> Iterator[str]:
    info = bundled_info(**changes)

    class Hostile(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, json.dumps(info).encode())

        def do_POST(self) -> None:
            status, message = respond(json.loads(self.body()))
            self.answer(status, json.dumps(message).encode())

    with http_server(Hostile) as url:
        yield url


_tokens = st.integers(0, VOCAB - 1)
_probabilities = st.floats(0, 1, width=32)
_configs = st.fixed_dictionaries(
    {},
    optional={
        "temp": st.sampled_from((0.0, 0.5, 1.0, 100.0)),
        "top_k": st.integers(0, 5),
        "top_p": st.floats(0.001, 1),
        "min_p": st.floats(0, 1),
        "rep_penalty": st.floats(0.01, 100),
        "bad_words": st.lists(st.lists(_tokens, min_size=1, max_size=2), max_size=2),
        "seed": st.integers(-(1 << 63), (1 << 63) - 1),
        "rule": st.sampled_from([*RULES]),
        "threshold": st.none() | st.floats(0.001, 1),
        "adjust": st.booleans(),
    },
)


@st.composite
def _rows(draw: st.DrawFn, node: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(("f4", "f2")))
    values = draw(st.lists(st.floats(0, 1, width=16), min_size=VOCAB, max_size=VOCAB))
    data = np.array(values, f"<{kind}").tobytes()
    return {"node": node, "type": kind, "values": base64.b64encode(data).decode()}


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Return a request that opens a context with a text, or continues one."""
    n = draw(st.integers(0, 3))
    text = [*PROMPT, *draw(st.lists(_tokens, max_size=2))]
    base = draw(st.sampled_from((0, 0, len(PROMPT))))
    request: dict[str, Any] = {
        "ctx_id": draw(st.sampled_from("ab")),
        "round": draw(st.integers(0, 3)),
        "epoch": draw(st.integers(0, 2)),
        "base": base,
        "digest": digest(text[:base]),
        "tokens": text[base:],
        "draft_tokens": draw(st.lists(_tokens, min_size=n, max_size=n)),
        "k": n,
    }
    optional = {
        "parents": [draw(st.integers(-1, node - 1)) for node in range(n)],
        "q_token_probs": [draw(_probabilities) for _ in range(n)],
        "rows": [draw(_rows(node)) for node in range(n)],
        "hard_mask": [draw(st.integers(0, 1)) for _ in range(n)],
        "top": draw(st.integers(0, 5)),
        "candidates": draw(st.integers(1, 5)),
    }
    request |= {name: value for name, value in optional.items() if draw(st.booleans())}
    if base == 0 or draw(st.booleans()):
        request["sampling_cfg"] = draw(_configs)
    if draw(st.integers(0, 5)) == 0:  # with the fields of the practice guide
        request = {name: value for name, value in request.items() if name not in ("round", "epoch", "base", "digest")}
    return request
