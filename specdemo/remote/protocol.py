"""What edge and cloud say to each other.

The fields are the practice guide's (section 5) and what makes them safe and exact: the tokens committed since the last
prefix that both ends hold, that prefix's length and digest, a round number and an epoch. How messages become bytes is
`encoding.py`'s.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgpack
import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.core.sampling import SamplingParams
from specdemo.remote.config import COLDEST

LONGEST_DRAFT = 256
LONGEST_TEXT = 1 << 17  # tokens
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Chance = Annotated[float, Field(ge=0, le=1)]


def _temperature(value: float) -> float:
    if value != 0 and value < COLDEST:
        raise ValueError(f"a temperature is 0 or at least {COLDEST}")
    return value


class WireMessage(BaseModel):
    """No guessing: unknown fields, numbers in quotes, NaN and infinity are refused."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, ser_json_bytes="base64", val_json_bytes="base64"
    )


class VerifyConfig(WireMessage):
    """What must be the same at both ends, and the rule; sent when a context is opened."""

    temp: Annotated[float, AfterValidator(_temperature), Field(le=100)] = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    rep_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    bad_words: Annotated[list[Annotated[list[Token], Field(min_length=1, max_length=64)]], Field(max_length=1024)] = []
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] = 0
    rule: str = "rejection"
    threshold: Chance | None = None
    adjust: bool = True  # corrections from the residual; else from p, which is lossy

    @property
    def sampling(self) -> SamplingParams:
        """The same as an object."""
        words = tuple(map(tuple, self.bad_words))
        return SamplingParams(self.temp, self.top_k, self.top_p, self.rep_penalty, words)


class DraftRow(WireMessage):
    """The drafter's law at one node: dense, or where it has mass. Little-endian, as numpy writes it."""

    node: Count
    type: Literal["f4", "f2"] = "f4"
    values: bytes
    ids: bytes | None = None  # u4

    @classmethod
    def of(cls, node: int, probs: Tensor, type: Literal["f4", "f2"] = "f4") -> DraftRow:
        """The shorter of the two ways to write `probs` `[vocab]`."""
        row = probs.float().cpu().numpy()
        where = row.nonzero()[0]
        size = int(type[1])
        if len(where) * (4 + size) < len(row) * size:
            return cls(node=node, type=type, values=_bytes(row[where], type), ids=_bytes(where, "u4"))
        return cls(node=node, type=type, values=_bytes(row, type))

    def probs(self, vocab_size: int) -> Tensor:
        """`[vocab_size]`, float32. Raises `UserError` for what is no law of that width."""
        if len(self.values) % int(self.type[1]) or len(self.ids or b"") % 4:
            raise UserError(f"the row of node {self.node} ends in the middle of a number: send whole numbers")
        values = np.frombuffer(self.values, f"<{self.type}").astype(np.float32)
        ids = np.arange(vocab_size) if self.ids is None else np.frombuffer(self.ids, "<u4").astype(np.int64)
        if len(ids) != len(values) or (ids >= vocab_size).any():
            raise UserError(
                f"the row of node {self.node} does not fit a vocabulary of {vocab_size:,}: send one value an id"
            )
        if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
            raise UserError(f"the row of node {self.node} is no law: send probabilities")
        probs = torch.zeros(vocab_size)
        probs[torch.from_numpy(ids)] = torch.from_numpy(values)
        return probs


class VerifyRequest(WireMessage):
    """Edge to cloud: a draft to be judged, and what was committed since the prefix that both hold.

    A round that is sent again under the same number gets the same answer. `base` 0 opens the context anew: then
    `tokens` is the whole text and `sampling_cfg` is needed. Without `q_token_probs` every drafted token is a point
    mass (or the rule needs no q). With them and `rows`, the cloud asks for the row that it needs; without `rows` it
    makes do with the scalars, which is lossy.
    """

    ctx_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    epoch: Count = 0
    round: Count
    base: Count
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""  # of the first `base` tokens
    tokens: Annotated[list[Token], Field(max_length=LONGEST_TEXT)] = []
    draft_tokens: Annotated[list[Token], Field(max_length=LONGEST_DRAFT)] = []
    k: Count
    parents: Annotated[list[Annotated[int, Field(ge=-1)]], Field(max_length=LONGEST_DRAFT)] | None = None  # None: chain
    q_token_probs: Annotated[list[Chance], Field(max_length=LONGEST_DRAFT)] | None = None
    rows: Annotated[list[DraftRow], Field(max_length=LONGEST_DRAFT)] | None = None
    hard_mask: Annotated[list[Literal[0, 1]], Field(max_length=LONGEST_DRAFT)] | None = None
    sampling_cfg: VerifyConfig | None = None
    candidates: Annotated[int, Field(ge=1, le=64)] = 1  # first choices per row that the answer holds
    top: Annotated[int, Field(ge=0, le=64)] = 0  # tokens of every law that the answer holds


class VerifyMetrics(WireMessage):
    """What a round was worth and what it cost the cloud."""

    alpha_mean: float | None = None  # mean min(1, p / q) of the tested tokens
    la_over_k: float | None = None
    cloud_s: float = 0.0  # the pass and the rule, seconds
    fed: Count = 0  # tokens that were not in the cache


class TopTokensMessage(WireMessage):
    """What is worth seeing of a law: its entropy in nats and its likeliest tokens."""

    entropy: float
    ids: list[Token]
    p: list[float]


class VerifyResponse(WireMessage):
    """Cloud to edge: the verdict. `correction` is null where nothing was rejected; then there is a `bonus` token.

    `wants` asks for the law of a node before there can be a verdict: send the round again with that row.
    """

    epoch: Count
    round: Count
    accepted_len: Count
    correction: Token | None = None
    bonus: Token | None = None
    wants: Count | None = None
    accepted: list[Count] | None = None  # nodes, of forests only
    tested: list[Count] | None = None  # likewise
    p: list[float] = []  # the target's probability of each node
    draws: list[float] | None = None  # of the tested nodes, in order
    choices: list[list[Token]] = []  # the target's first choices after each row
    laws: list[TopTokensMessage] | None = None  # of each row, if they were asked for
    metrics: VerifyMetrics = VerifyMetrics()


class StreamRequest(WireMessage):
    """Edge to cloud: decode plainly from here on; tokens come back as they are made, a line each."""

    tokens: Annotated[list[Token], Field(min_length=1, max_length=LONGEST_TEXT)]
    sampling_cfg: VerifyConfig
    max_tokens: Annotated[int, Field(ge=1, le=LONGEST_TEXT)]


class ErrorResponse(WireMessage):
    """Why there is no answer, in one sentence, and what kind of reason it is."""

    error: str
    code: str


class DeleteResponse(WireMessage):
    """Whether there was a context to forget."""

    forgotten: bool


class ServiceInfo(WireMessage):
    """The model behind the service: what an edge must know to go with it."""

    name: str
    vocab_size: Count
    context: Count
    stop: list[Token]
    tokenizer: str  # fingerprint
    engine: str
    dtype: str
    device: str
    threads: Count
    weight_bytes: int
    bit_equal: bool


def digest(tokens: Sequence[int]) -> str:
    """Eight bytes that tell one text from another, in hexadecimal; nothing for the empty one."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}I", *tokens), digest_size=8).hexdigest() if tokens else ""


def _bytes(values: Any, kind: str) -> bytes:
    return np.asarray(values).astype(f"<{kind}").tobytes()


M = TypeVar("M", bound=WireMessage)
PACKED = 1  # msgpack's extension type for a list of float32: what comes from a law loses nothing in it


def _compact(value: Any) -> Any:
    """Lists of numbers that float32 holds exactly, in four bytes each instead of nine."""
    if isinstance(value, dict):
        return {key: _compact(one) for key, one in value.items()}
    if isinstance(value, list) and value and all(isinstance(one, float) for one in value):
        row = np.asarray(value, dtype="<f4")
        if row.tolist() == value:
            return msgpack.ExtType(PACKED, row.tobytes())
    return value


def _expanded(kind: int, data: bytes) -> Any:
    if kind != PACKED or len(data) % 4:
        raise ValueError("an unknown extension")
    return np.frombuffer(data, "<f4").tolist()


def _to_msgpack(message: WireMessage) -> bytes:
    return msgpack.packb(_compact(message.model_dump(exclude_defaults=True)))


def _from_msgpack(kind: type[M], body: bytes) -> M:
    try:
        value = msgpack.unpackb(body, ext_hook=_expanded, use_list=True, raw=False)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise UserError(f"the body is not msgpack: {str(error) or type(error).__name__}") from error
    return kind.model_validate(value)


@dataclass(frozen=True)
class Encoding:
    """Messages to bytes and back."""

    dump: Callable[[WireMessage], bytes]
    parse: Callable[[type[Any], bytes], Any]

    def load(self, kind: type[M], body: bytes) -> M:
        """A message; `UserError` with the first thing that is wrong with it."""
        try:
            return self.parse(kind, body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or kind.__name__
            raise UserError(f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error


ENCODINGS: Mapping[str, Encoding] = {
    "application/json": Encoding(
        lambda message: message.model_dump_json(exclude_defaults=True).encode(),
        lambda kind, body: kind.model_validate_json(body),
    ),
    "application/msgpack": Encoding(_to_msgpack, _from_msgpack),
}
