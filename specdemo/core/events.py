"""Events of a run: `Loading`, `Header`, a `StepEvent` per step, `End`. Frozen and picklable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from specdemo.core.metrics import Metrics
from specdemo.core.step import Outcome, Step, TokenLogprob

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of loading, or of the prefill in tokens; not part of the trace. `total` is 0 if unknown.

    `warning`: the text also matters to readers who do not follow the progress.
    """

    text: str
    done: int = 0
    total: int = 0
    warning: bool = False


ReportProgress: TypeAlias = Callable[[Loading], None]


def ignore_progress(progress: Loading) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Header:
    """First line of a trace. `recipe` is a plain mapping, since old traces may not satisfy the schema."""

    recipe: Mapping[str, Any]
    prompt: str
    prompt_tokens: tuple[int, ...]
    vocab_size: int = 1
    exact: bool = True
    bit_equal: bool = False  # rows have the same bits in passes of any size
    encoder: bool = False  # the prompt was read by an encoder
    cached_tokens: int = 0  # prompt tokens in the KV cache of the target before the run
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptScores(Loading):
    """End of the prefill with texts and log-probabilities of the prompt tokens, None for the first, if requested."""

    texts: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes used by the process, by device tensors, by keys and values, and by a store of n-grams or suffixes."""

    process: float | None = None
    device: float | None = None
    kv: float | None = None
    store: float | None = None  # known at the end of a run
    reserved: float | None = None  # device memory of torch, known at the end of a run
    read: float | None = None  # weights, after the first step; not in traces


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token in the display of a step; draft tokens have a `node`."""

    outcome: Outcome
    text: str
    token: int
    node: int | None = None


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step with its texts, memory use and cumulative metrics."""

    step: Step
    pieces: tuple[str, ...]  # texts of the committed tokens
    draft_texts: tuple[str, ...] = ()
    token_texts: Mapping[int, str] = field(default_factory=dict)
    pending_text: str = ""  # text of the best beam that is not yet committed
    memory: MemoryUse = MemoryUse()
    metrics: Metrics = Metrics()
    written: tuple[str, ...] = ()  # pieces before stop texts were withheld or cut; not in traces

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def shown(self) -> Iterator[ShownToken]:
        """Yield accepted path, discarded drafts, token of the target."""
        step, verdict = self.step, self.step.verdict
        for node, piece in zip(verdict.accepted, self.pieces, strict=False):
            yield ShownToken(step.outcome(node), piece, step.draft.tokens[node], node)
        for node, text in enumerate(self.draft_texts):
            if node not in verdict.accepted:
                yield ShownToken(step.outcome(node), text, step.draft.tokens[node], node)
        accepted = len(verdict.accepted)
        for token, piece in zip(verdict.target_tokens, self.pieces[accepted:], strict=False):
            yield ShownToken(step.kind, piece, token)


@dataclass(frozen=True, slots=True)
class End:
    """Last line of a trace. `reason`: stop, length, cancelled or error."""

    reason: str
    error: str | None = None
    metrics: Metrics = Metrics()
    peak: MemoryUse | None = None  # `kv` and `store` are the last values
    context_full: bool = False
    pair_speeds: tuple[float, ...] = ()  # tokens per second of each repetition of a comparison


Event = Loading | Header | StepEvent | End
