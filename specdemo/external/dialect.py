"""Protocol of an engine's dialect: requests, and steps from recorded events."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from specdemo.core.step import Step
from specdemo.external.schema import GenerationRequest

RecordedEvent = tuple[float, str]  # seconds after the request, JSON
EndReason = Literal["stop", "length"]
Encode = Callable[[str], Sequence[int]]


CUT_OFF = "the stream ended before the text"


class Dialect(Protocol):
    """Requests and responses of an engine."""

    path: str
    can_detokenize: bool  # True if /detokenize returns the text of ids

    def body(self, request: GenerationRequest, model: str) -> Mapping[str, Any]:
        """Return the request of a streamed text."""

    def steps(self, events: Iterable[RecordedEvent], encode: Encode) -> Generator[Step, None, EndReason]:
        """Yield the steps of a stream; return the reason of its end. Raises `ValueError` for invalid events."""
