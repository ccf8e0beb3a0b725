"""Messages between edge and cloud, and their JSON and msgpack encodings.

Field names on the network are frozen (practice guide, section 5); `_key` maps them to Python names.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import msgpack
import numpy as np
import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from torch import Tensor

from specdemo.core.errors import MAX_KEYS, ListOf, UserError, limited_object, plain_text
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft, TopTokens, Verdict
from specdemo.core.step_record import MAX_NODES, MAX_RECORDED, Number
from specdemo.remote.config import COLDEST

MAX_DRAFT = 256  # tokens
MAX_TEXT = 1 << 17  # tokens
MAX_VOCAB = 1 << 22  # token ids
SESSION_HEADER = "x-session-id"
MAX_REPLICA = 100  # characters of a name
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Probability = Annotated[float, Field(ge=0, le=1)]
Reported = Annotated[float, Field(ge=0, le=1.0001)]  # probability in a response: float32 sums may slightly exceed 1
ExternalText = Annotated[str, AfterValidator(plain_text)]
RowType = Literal["f4", "f2"]


def _key(name: str) -> FieldInfo:
    field: FieldInfo = Field(validation_alias=name, serialization_alias=name)
    return field


def _check_temperature(value: float) -> float:
    if value != 0 and value < COLDEST:
        raise ValueError(f"a temperature is 0 or at least {COLDEST}")
    return value


class NetworkMessage(BaseModel):
    """Base class; rejects unknown fields, quoted numbers, NaN and infinity."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_bytes="base64",
        val_json_bytes="base64",
        validate_by_name=True,  # not in `CODECS`
        validate_by_alias=True,
    )


MessageT = TypeVar("MessageT", bound=NetworkMessage)


class ResponseMessage(NetworkMessage):
    """Response: unknown fields are ignored, so that services can be extended."""

    model_config = ConfigDict(extra="ignore")


class VerifyConfig(NetworkMessage):
    """Sampling parameters, seed and acceptance rule of a context."""

    temperature: Annotated[float, _key("temp"), AfterValidator(_check_temperature), Field(le=100)] = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Field(ge=0.001, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, _key("rep_penalty"), Field(ge=0.01, le=100)] = 1.0
    bad_words: Annotated[
        ListOf[Annotated[ListOf[Token], Field(min_length=1, max_length=64)]], Field(max_length=1024)
    ] = []
    bad_texts: Annotated[ListOf[Annotated[str, Field(min_length=1, max_length=300)]], Field(max_length=64)] = []
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] = 0
    rule: str = "rejection"
    threshold: Annotated[float, Field(ge=0.001, le=1)] | None = None
    adjust: bool = True  # False: sample corrections from p (lossy)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams.of(self, bad_words=tuple(map(tuple, self.bad_words)))


class DraftRow(NetworkMessage):
    """Draft distribution at a node, little-endian."""

    node: Count
    type: RowType = "f4"
    values: bytes
    ids: bytes | None = None  # u4, sparse rows only

    @classmethod
    def of(cls, node: int, probs: Tensor, type: RowType = "f4") -> DraftRow:
        """Encode `probs` `[vocab]`, dense or sparse."""
        row = probs.float().cpu().numpy()
        nonzero = row.nonzero()[0]
        size = int(type[1])
        if len(nonzero) * (4 + size) < len(row) * size:
            return cls(node=node, type=type, values=_to_bytes(row[nonzero], type), ids=_to_bytes(nonzero, "u4"))
        return cls(node=node, type=type, values=_to_bytes(row, type))

    def probs(self, vocab_size: int) -> Tensor:
        """Decode to float32 `[vocab_size]`."""
        if len(self.values) % int(self.type[1]) or len(self.ids or b"") % 4:
            raise UserError(f"the row of node {self.node} ends in the middle of a number: send complete numbers")
        values = np.frombuffer(self.values, f"<{self.type}").astype(np.float32)
        ids = np.arange(vocab_size) if self.ids is None else np.frombuffer(self.ids, "<u4").astype(np.int64)
        if len(ids) != len(values) or (ids >= vocab_size).any():
            raise UserError(
                f"the row of node {self.node} does not fit a vocabulary of {vocab_size:,}: send a value per id"
            )
        if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
            raise UserError(f"the row of node {self.node} is no distribution: send probabilities")
        probs = torch.zeros(vocab_size, dtype=torch.float32)
        probs[torch.from_numpy(ids)] = torch.from_numpy(values)
        return probs


class VerifyRequest(NetworkMessage):
    """Draft, and the tokens committed since the shared prefix of `base` tokens.

    A repeated request gets the same response. `base` 0 opens the context and requires `config`. `token_probs` is None
    for point masses and rules without q. With `rows`, the cloud requests missing rows; without, it uses `token_probs`
    (lossy). Without `round` a request has the fields of the practice guide, see `contexts.numbered`.
    """

    context_id: Annotated[str, _key("ctx_id"), Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    epoch: Count = 0
    step: Annotated[Count | None, _key("round")] = None
    base: Count | None = None
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""  # hash of the first `base` tokens
    tokens: Annotated[ListOf[Token], Field(max_length=MAX_TEXT)] = []
    draft_tokens: Annotated[ListOf[Token], Field(max_length=MAX_DRAFT)] = []
    k: Count
    parents: Annotated[ListOf[Annotated[int, Field(ge=-1)]], Field(max_length=MAX_DRAFT)] | None = None  # None: chain
    token_probs: Annotated[
        Annotated[ListOf[Probability], Field(max_length=MAX_DRAFT)] | None, _key("q_token_probs")
    ] = None
    rows: Annotated[ListOf[DraftRow], Field(max_length=MAX_DRAFT)] | None = None
    hard_mask: Annotated[ListOf[Literal[0, 1]], Field(max_length=MAX_DRAFT)] | None = None
    config: Annotated[VerifyConfig | None, _key("sampling_cfg")] = None
    candidates: Annotated[int, Field(ge=1, le=64)] = 1  # target tokens to return per row
    top: Annotated[int, Field(ge=0, le=64)] = 0

    @model_validator(mode="after")
    def _numbered_completely(self) -> Self:
        if self.step is None and (self.base is not None or self.digest or self.epoch):
            raise ValueError("base, digest and epoch need round: send it, or none of them")
        if self.step is not None and self.base is None:
            raise ValueError("round needs base: send the length of the shared text, 0 for a new context")
        return self


class VerifyMetrics(ResponseMessage):
    """Acceptance and cost of a verification."""

    alpha_mean: float | None = None  # mean min(1, p / q) of the tested tokens
    la_over_k: float | None = None
    cloud_s: Annotated[float, Field(ge=0, le=1e6)] = 0.0  # forward pass and rule
    fed: Count = 0  # tokens that were not in the cache


class TopTokensMessage(ResponseMessage):
    """Most probable tokens of a distribution."""

    entropy: Number  # nats
    ids: Annotated[ListOf[Token], Field(max_length=MAX_RECORDED)]
    p: Annotated[ListOf[Reported], Field(max_length=MAX_RECORDED)]

    @classmethod
    def of(cls, top: TopTokens) -> TopTokensMessage:
        return cls(entropy=top.entropy, ids=[token for token, _ in top.top], p=[p for _, p in top.top])

    def decoded(self) -> TopTokens:
        return TopTokens(self.entropy, tuple(zip(self.ids, self.p, strict=True)))


class VerifyResponse(ResponseMessage):
    """Verdict, or a request for draft rows."""

    epoch: Count
    step: Annotated[Count, _key("round")]
    accepted_len: Count
    correction: Token | None = None
    bonus: Token | None = None
    wanted_row: Annotated[Count | None, _key("wants")] = None
    wanted_rows: Annotated[ListOf[Count], _key("wants_rows"), Field(max_length=MAX_DRAFT)] = []
    accepted: ListOf[Count] | None = None  # nodes; forests only
    tested: ListOf[Count] | None = None  # nodes; forests and blocks only
    p: ListOf[Reported] = []  # an entry per node
    draws: ListOf[Reported] | None = None  # an entry per tested node
    choices: ListOf[Annotated[ListOf[Token], Field(max_length=MAX_NODES)]] = []  # target tokens of each row
    target_top: Annotated[ListOf[TopTokensMessage] | None, _key("laws")] = None
    # The next three are sent if the request sets `top`, bounds also for blocks; the first two have an entry per node.
    bounds: ListOf[Reported | None] | None = None
    ranks: ListOf[Count] | None = None
    token_top: TopTokensMessage | None = None
    lossy: bool = False  # the verdict does not preserve the target's distribution
    metrics: VerifyMetrics = VerifyMetrics()

    @model_serializer(mode="wrap")
    def _with_correction(self, dump: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # keeps the schema
        """Include `correction` if it is None, as the practice guide does."""
        message = dump(self)
        return message if self.correction is not None else {**message, "correction": None}

    @classmethod
    def of(
        cls, request: VerifyRequest, draft: Draft, verdict: Verdict, *, block: bool = False, lossy: bool = False
    ) -> VerifyResponse:
        """Encode a verdict; `block`: of block verification."""
        tested = [node for node, beta in enumerate(verdict.beta) if beta is not None]
        draws = [draw for node in tested if (draw := verdict.draw[node]) is not None]
        alphas = [_acceptance_prob(verdict.p[node] or 0.0, draft, node) for node in tested]
        last = verdict.accepted[-1] if verdict.accepted else -1
        rejected = last in draft.parents
        return cls(
            epoch=request.epoch,
            step=request.step or 0,
            accepted_len=len(verdict.accepted),
            correction=verdict.token if rejected else None,
            bonus=None if rejected else verdict.token,
            accepted=None if request.parents is None else list(verdict.accepted),
            tested=None if request.parents is None and not block else tested,
            p=cast(list[float], list(verdict.p)),
            draws=draws if draws and len(draws) == len(tested) else None,
            choices=[list(row) for row in verdict.choices],
            target_top=[TopTokensMessage.of(top) for top in verdict.target_top] or None,
            bounds=list(verdict.bound) or None if request.top or block else None,
            ranks=list(verdict.rank) or None,
            token_top=None if verdict.token_top is None else TopTokensMessage.of(verdict.token_top),
            lossy=lossy,
            metrics=VerifyMetrics(
                alpha_mean=sum(alphas) / len(alphas) if alphas else None,
                la_over_k=len(verdict.accepted) / request.k if request.k else None,
            ),
        )

    def to(self, draft: Draft, vocab_size: int = MAX_VOCAB) -> Verdict:
        """Return the verdict; beta is min(1, p / q), with mean sum min(p, q) over q.

        Raises `UserError` if the response does not fit `draft` or the vocabulary.
        """
        self._check(draft, vocab_size)
        tested = self._tested_nodes(draft)
        draws: list[float | None] = [None] * len(draft)
        betas: list[float | None] = [None] * len(draft)
        for i, node in enumerate(tested):
            betas[node] = _acceptance_prob(self.p[node], draft, node)
            draws[node] = self.draws[i] if self.draws else None
        # Random acceptance tests without siblings have the bound min(1, p / q).
        bounds = self.bounds or [None if draw is None else beta for draw, beta in zip(draws, betas, strict=True)]
        return Verdict(
            tuple(self.accepted_nodes),
            self.token,
            tuple(self.p),
            tuple(draws),
            tuple(betas),
            tuple(map(tuple, self.choices)),
            bound=tuple(bounds),
            rank=tuple(self.ranks or ()),
            target_top=tuple(top.decoded() for top in self.target_top or ()),
            token_top=None if self.token_top is None else self.token_top.decoded(),
        )

    @property
    def wanted(self) -> list[int]:
        return self.wanted_rows if self.wanted_row is None else [self.wanted_row]

    @property
    def accepted_nodes(self) -> Sequence[int]:
        return range(self.accepted_len) if self.accepted is None else self.accepted

    @property
    def token(self) -> int | None:
        return self.bonus if self.correction is None else self.correction

    def _check(self, draft: Draft, vocab_size: int) -> None:
        tops = [*(self.target_top or ()), *filter(None, [self.token_top])]
        ids = [self.token or 0, *(token for row in self.choices for token in row)]
        if max(ids + [token for top in tops for token in top.ids]) >= vocab_size:
            raise UserError(
                f"the cloud sent a token outside of its {vocab_size:,} ids: use the same version at both ends"
            )
        if not all(self._agreements(draft)) or any(len(top.ids) != len(top.p) for top in tops):
            raise UserError("the cloud's response does not fit the draft: use the same version at both ends")

    def _tested_nodes(self, draft: Draft) -> Sequence[int]:
        if self.tested is None and self.accepted is None:
            return range(min(self.accepted_len + 1, len(draft)))
        return self.tested or ()

    def _agreements(self, draft: Draft) -> Iterator[bool]:
        nodes, n = self.accepted_nodes, len(draft)
        tested = self._tested_nodes(draft)
        yield len(nodes) == self.accepted_len <= n and all(node < n for node in (*nodes, *tested))
        path = zip([-1, *nodes], nodes, strict=False)
        yield all(draft.parents[node] == parent for parent, node in path)
        rejected = (nodes[-1] if nodes else -1) in draft.parents
        yield (self.correction is not None, self.bonus is not None) == (rejected, not rejected)
        yield len(set(tested)) == len(tested) == len(tested if self.draws is None else self.draws)
        yield len(self.p) == n and all(len(values) == n for values in (self.bounds, self.ranks) if values)
        yield len(self.choices) == n + 1 and all(self.choices)
        yield len(self.target_top or self.choices) == n + 1


def _acceptance_prob(p: float, draft: Draft, node: int) -> float:
    q = 1.0 if draft.token_probs is None else draft.token_probs[node]
    return min(1.0, p / q) if q else 0.0


@dataclass(frozen=True)
class PrefillPosition:
    """Progress of a prefill, in tokens."""

    count: int


class StreamRequest(NetworkMessage):
    """Request for autoregressive decoding."""

    tokens: Annotated[ListOf[Token], Field(min_length=1, max_length=MAX_TEXT)]
    config: Annotated[VerifyConfig, _key("sampling_cfg")]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TEXT)]


class ErrorResponse(ResponseMessage):
    """Error with a sentence for users and a code for programs; `position` with code `prefill`: tokens read."""

    error: ExternalText
    code: ExternalText
    position: Count = 0


class DeleteResponse(ResponseMessage):
    """Result of deleting a context."""

    deleted: Annotated[bool, _key("forgotten")]


class ReadyResponse(ResponseMessage):
    """Sign of life."""


Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]


class ServiceIdentity(ResponseMessage):
    """Digests (see `ModelIdentity`) and name of a service."""

    model: Digest = ""
    numerics: Digest = ""
    replica: Annotated[ExternalText, Field(max_length=MAX_REPLICA)] = ""

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[bytes, bytes]]) -> ServiceIdentity:
        """Raises `ValueError`."""
        values = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in headers}
        return cls(**{name: values[header] for name, header in IDENTITY_HEADERS.items() if header in values})

    @property
    def headers(self) -> dict[str, str]:
        return {header: getattr(self, name) for name, header in IDENTITY_HEADERS.items()}


IDENTITY_HEADERS = {name: f"x-specdemo-{name}" for name in ServiceIdentity.model_fields}


class ServiceInfo(ServiceIdentity):
    """Description of a service's target."""

    name: ExternalText
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB)]
    context: Count
    stop: Annotated[ListOf[Token], Field(max_length=1024)]
    tokenizer: ExternalText  # fingerprint
    engine: ExternalText
    dtype: ExternalText
    device: ExternalText
    threads: Count
    weight_bytes: Annotated[int, Field(ge=0, lt=1 << 60)]
    bit_equal: bool
    chains_only: ExternalText = ""  # why forests are refused


def digest(tokens: Sequence[int]) -> str:
    """Return a 64-bit BLAKE2b hash of `tokens` in hexadecimal."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}I", *tokens), digest_size=8).hexdigest() if tokens else ""


def _to_bytes(values: Any, kind: str) -> bytes:
    return np.asarray(values).astype(f"<{kind}").tobytes()


_FLOAT32_LIST = 1  # msgpack extension type


def _compact(value: Any) -> Any:
    """Pack float lists as float32 if that is exact."""
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, float) for item in value):
        row = np.asarray(value, dtype="<f4")
        if row.tolist() == value:
            return msgpack.ExtType(_FLOAT32_LIST, row.tobytes())
    return value


def _expand(kind: int, data: bytes) -> Any:
    if kind != _FLOAT32_LIST or len(data) % 4:
        raise ValueError("an unknown extension")
    return np.frombuffer(data, "<f4").tolist()


def _from_json(kind: type[MessageT], body: bytes) -> MessageT:
    try:
        json.loads(body, object_pairs_hook=limited_object, parse_int=float)  # an `int` is limited to 4,300 digits
    except UserError:
        raise
    except (ValueError, RecursionError):
        pass  # described by Pydantic
    return kind.model_validate_json(body, by_alias=True, by_name=False)


def _from_msgpack(kind: type[MessageT], body: bytes) -> MessageT:
    try:
        value = msgpack.unpackb(body, max_map_len=MAX_KEYS, ext_hook=_expand, use_list=True, raw=False)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        cause = str(error) or type(error).__name__
        raise Unreadable(f"the body is not msgpack with at most {MAX_KEYS} keys per object: {cause}") from error
    return kind.model_validate(value, by_alias=True, by_name=False)


class Unreadable(UserError):
    """Neither JSON nor msgpack."""


@dataclass(frozen=True)
class Codec:
    """Encoding of messages."""

    dump: Callable[[NetworkMessage], bytes]
    parse: Callable[[type[Any], bytes], Any]

    def load(self, kind: type[MessageT], body: bytes) -> MessageT:
        """Parse a message; `UserError` names the first invalid field."""
        try:
            message: MessageT = self.parse(kind, body)
            return message
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            location = ".".join(map(str, first["loc"])) or kind.__name__
            kind_of_error = Unreadable if first["type"] == "json_invalid" else UserError
            raise kind_of_error(f"{location}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error


CODECS: Mapping[str, Codec] = {
    "application/json": Codec(
        lambda message: message.model_dump_json(exclude_defaults=True, by_alias=True).encode(),
        _from_json,
    ),
    "application/msgpack": Codec(
        lambda message: msgpack.packb(_compact(message.model_dump(exclude_defaults=True, by_alias=True))),
        _from_msgpack,
    ),
}
