"""How messages become bytes: JSON, or msgpack for those who count them; the content type says which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import numpy as np
from pydantic import ValidationError

from specdemo.core.errors import Refused
from specdemo.remote.wire import Message

M = TypeVar("M", bound=Message)
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


def _to_msgpack(message: Message) -> bytes:
    return msgpack.packb(_compact(message.model_dump(exclude_defaults=True)))


def _from_msgpack(kind: type[M], body: bytes) -> M:
    try:
        value = msgpack.unpackb(body, ext_hook=_expanded, use_list=True, raw=False)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise Refused(f"the body is not msgpack: {str(error) or type(error).__name__}") from error
    return kind.model_validate(value)


@dataclass(frozen=True)
class Encoding:
    """Messages to bytes and back."""

    dump: Callable[[Message], bytes]
    parse: Callable[[type[Any], bytes], Any]

    def load(self, kind: type[M], body: bytes) -> M:
        """A message; `Refused` with the first thing that is wrong with it."""
        try:
            return self.parse(kind, body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or kind.__name__
            raise Refused(f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error


ENCODINGS: Mapping[str, Encoding] = {
    "application/json": Encoding(
        lambda message: message.model_dump_json(exclude_defaults=True).encode(),
        lambda kind, body: kind.model_validate_json(body),
    ),
    "application/msgpack": Encoding(_to_msgpack, _from_msgpack),
}
