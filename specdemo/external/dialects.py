"""Dialects of other engines: requests of a streamed text, and steps from the tokens and counts of its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import AliasPath, BaseModel, ConfigDict, Field

from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft, Source, Step, Verdict

RecordedEvent = tuple[float, str]  # seconds after the request, JSON
EndReason = Literal["stop", "length"]
Encode = Callable[[str], Sequence[int]]
_Number = Annotated[int, Field(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class Chunk:
    """Tokens of a streamed chunk, received `t` seconds after the request."""

    t: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class StepCounts:
    """Accepted and drafted tokens of a step."""

    accepted: int
    drafted: int


NO_DRAFT = StepCounts(0, 0)


def reported_step(i: int, t: float, tokens: Sequence[int], counts: StepCounts | None) -> Step:
    """Return a step of committed `tokens`; the text may end before all accepted tokens. None: counts are unknown."""
    accepted, drafted = (counts.accepted, counts.drafted) if counts is not None else (0, 0)
    shown = min(accepted, len(tokens))
    unknown = (None,) * shown
    return Step(
        i,
        tuple(tokens),
        Draft(tuple(tokens[:shown]), tuple(range(-1, shown - 1)), undisclosed=drafted - shown),
        Verdict(
            accepted=tuple(range(shown)),
            token=tokens[shown] if shown < len(tokens) else None,
            p=unknown,
            draw=unknown,
            beta=unknown,
            source=Source.TARGET if counts is not None else Source.UNREPORTED,
        ),
        gamma=drafted,
        draft_s=None,
        verify_s=None,
        host_s=None,
        t=t,
    )


def steps_of_totals(chunks: Iterable[tuple[Chunk, StepCounts]]) -> Iterator[Step]:
    """Yield the steps of chunks with the totals of accepted and drafted tokens so far.

    The first token of a step has the totals of the complete step. A change within a chunk may belong to several steps:
    its tokens, and as many as were accepted, have unknown counts.
    """
    before = step = NO_DRAFT
    tokens: list[int] = []
    i = missing = unknown = 0
    t = 0.0
    for chunk, totals in chunks:
        for left, token in zip(range(len(chunk.tokens), 0, -1), chunk.tokens, strict=True):
            if not missing and left > 1 and totals != before:
                before, unknown = totals, left + totals.accepted - before.accepted
            elif totals != before:
                unknown = 0
            if unknown:
                yield reported_step(i, chunk.t, [token], None)
                i, unknown = i + 1, unknown - 1
                continue
            if not missing:
                step = StepCounts(totals.accepted - before.accepted, totals.drafted - before.drafted)
                before, missing = totals, 1 + step.accepted
            tokens, t = [*tokens, token], chunk.t
            missing -= 1
            if not missing:
                yield reported_step(i, t, tokens, step)
                i, tokens = i + 1, []
    if tokens:
        yield reported_step(i, t, tokens, step)


def steps_of_drafts(chunks: Sequence[Chunk], drafts: Sequence[StepCounts] | None) -> Iterator[Step]:
    """Yield the steps of a text; `drafts`: counts of the steps with a draft, known at its end.

    The first token is the result of the prefill. Ambiguous tokens have unknown counts.
    """
    tokens = [token for chunk in chunks for token in chunk.tokens]
    times = [chunk.t for chunk in chunks for _ in chunk.tokens]
    if not tokens:
        return
    yield reported_step(0, times[0], tokens[:1], NO_DRAFT)
    first, *others = [len(chunk.tokens) for chunk in chunks if chunk.tokens]
    sizes = [size for size in (first - 1, *others) if size]
    start = 1
    for i, (length, counts) in enumerate(_divided(sizes, drafts), 1):
        yield reported_step(i, times[start + length - 1], tokens[start : start + length], counts)
        start += length


def _divided(sizes: Sequence[int], drafts: Sequence[StepCounts] | None) -> Sequence[tuple[int, StepCounts | None]]:
    """Return number of tokens and counts of each step, for chunks of these sizes.

    If some steps have no draft, each chunk must be a step, and a single token may follow a rejected draft or no draft.
    Tokens are unknown if chunks contradict the counts.
    """
    unknown: list[tuple[int, StepCounts | None]] = [(1, None)] * sum(sizes)
    if drafts is None:
        return unknown
    if sum(draft.accepted + 1 for draft in drafts) == len(unknown):
        return [(draft.accepted + 1, draft) for draft in drafts]
    accepting = [draft for draft in drafts if draft.accepted]
    expected = [draft.accepted + 1 for draft in accepting]
    if expected and sizes and sizes[-1] > 1:  # the text may end within a step
        expected[-1] = min(expected[-1], sizes[-1])
    if expected != [size for size in sizes if size > 1]:
        return unknown
    single = NO_DRAFT if len(accepting) == len(drafts) else None
    following = iter(accepting)
    return [(size, next(following) if size > 1 else single) for size in sizes]


def _at(first: str, *rest: str | int) -> Any:
    return Field(None, validation_alias=AliasPath(first, *rest))


class EngineResponse(BaseModel):
    """Used fields of a response."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True)
class GenerationRequest:
    """Prompt and sampling of a request."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    seed: int


class Dialect(Protocol):
    """Requests and responses of an engine."""

    path: str
    can_detokenize: bool  # True if /detokenize returns the text of ids

    def body(self, request: GenerationRequest, model: str) -> Mapping[str, Any]:
        """Return the request of a streamed text."""

    def steps(self, events: Iterable[RecordedEvent], encode: Encode) -> Iterator[Step | EndReason]:
        """Yield the steps of a stream, then the reason of its end. Raises `ValueError` for invalid events."""


def _checked_reason(reason: str | None) -> EndReason:
    if reason is None:
        raise ValueError("the stream ended before the text")
    return "length" if reason in ("length", "limit") else "stop"


class LlamaChunk(EngineResponse):
    """Event with `return_tokens` and `timings_per_token`; counts of drafts are absent before the first draft."""

    content: str = ""
    tokens: list[_Number] = []
    predicted: Annotated[_Number, Field(validation_alias=AliasPath("timings", "predicted_n"))]
    drafted: _Number | None = _at("timings", "draft_n")
    accepted: _Number | None = _at("timings", "draft_n_accepted")
    stop: bool = False
    stop_type: str = ""


class LlamaCpp(Dialect):
    """llama.cpp's /completion: a chunk per token, with the totals of drafted and accepted tokens."""

    path, can_detokenize = "/completion", True

    def body(self, request: GenerationRequest, model: str) -> Mapping[str, Any]:
        numbers = request.sampling.numbers
        penalty = numbers.pop("repetition_penalty")
        return {
            **numbers,
            "prompt": list(request.prompt),
            "n_predict": request.max_tokens,
            "repeat_penalty": penalty,
            "repeat_last_n": len(request.prompt) + request.max_tokens,
            "samplers": ["penalties", *numbers],  # the order of this program
            "seed": request.seed & 0xFFFFFFFF,
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
            "timings_per_token": True,
        }

    def steps(self, events: Iterable[RecordedEvent], encode: Encode) -> Iterator[Step | EndReason]:
        reason: str | None = None

        def chunks() -> Iterator[tuple[Chunk, StepCounts]]:
            nonlocal reason
            known = 0
            for t, text in events:
                chunk = LlamaChunk.model_validate_json(text)
                if chunk.stop:
                    reason = chunk.stop_type
                if not chunk.tokens:
                    continue
                tokens = tuple(chunk.tokens)
                if (hidden := chunk.predicted - known - len(tokens)) > 0:
                    tokens = _with_hidden(tokens, hidden, encode(chunk.content))
                known = chunk.predicted
                yield Chunk(t, tokens), StepCounts(chunk.accepted or 0, chunk.drafted or 0)

        yield from steps_of_totals(chunks())
        yield _checked_reason(reason)


def _with_hidden(tokens: tuple[int, ...], hidden: int, encoded: Iterable[int]) -> tuple[int, ...]:
    """Return `tokens` after the unreported tokens of an incomplete character."""
    complete = tuple(encoded)
    if len(complete) != hidden + len(tokens) or complete[hidden:] != tokens:
        raise ValueError("the tokens of a character are not reported")
    return complete


class VllmChunk(EngineResponse):
    """Event with `return_token_ids`; the last one has the counts of the steps with a draft."""

    tokens: list[_Number] | None = _at("choices", 0, "token_ids")
    finish_reason: str | None = _at("choices", 0, "finish_reason")
    steps: _Number | None = _at("metrics", "speculative_decoding", "num_spec_steps")
    accepted: list[_Number] | None = _at("metrics", "speculative_decoding", "per_step_accepted")
    drafted: list[_Number] | None = _at("metrics", "speculative_decoding", "per_step_drafted")


class Vllm(Dialect):
    """vLLM's /v1/completions (>= 0.29 with `--per-request-spec-decode-metrics detailed`)."""

    path, can_detokenize = "/v1/completions", True

    def body(self, request: GenerationRequest, model: str) -> Mapping[str, Any]:
        return {
            "model": model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            **request.sampling.numbers,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    def steps(self, events: Iterable[RecordedEvent], encode: Encode) -> Iterator[Step | EndReason]:
        chunks: list[Chunk] = []
        drafts, reason = None, None
        for t, text in events:
            chunk = VllmChunk.model_validate_json(text)
            chunks.append(Chunk(t, tuple(chunk.tokens or ())))
            reason = chunk.finish_reason or reason
            accepted, drafted = chunk.accepted or [], chunk.drafted or []  # vLLM omits empty lists
            if chunk.steps == len(accepted):
                drafts = [StepCounts(*counts) for counts in zip(accepted, drafted, strict=True)]
        end = _checked_reason(reason)
        yield from steps_of_drafts(chunks, drafts)
        yield end


class SglangChunk(EngineResponse):
    """Event with all tokens so far, or the new ones."""

    output_ids: list[_Number]
    completion_tokens: _Number | None = _at("meta_info", "completion_tokens")
    finish_reason: str | None = _at("meta_info", "finish_reason", "type")


class Sglang(Dialect):
    """SGLang's /generate, from its documented fields, not run; steps are unknown."""

    path, can_detokenize = "/generate", False

    def body(self, request: GenerationRequest, model: str) -> Mapping[str, Any]:
        sampling = {
            **request.sampling.numbers,
            "top_k": request.sampling.top_k or -1,
            "max_new_tokens": request.max_tokens,
            "sampling_seed": request.seed,
        }
        return {"input_ids": list(request.prompt), "sampling_params": sampling, "stream": True}

    def steps(self, events: Iterable[RecordedEvent], encode: Encode) -> Iterator[Step | EndReason]:
        chunks: list[Chunk] = []
        known = 0
        reason = None
        for t, text in events:
            chunk = SglangChunk.model_validate_json(text)
            new = chunk.output_ids[known:] if len(chunk.output_ids) == chunk.completion_tokens else chunk.output_ids
            chunks.append(Chunk(t, tuple(new)))
            known += len(new)
            reason = chunk.finish_reason
        end = _checked_reason(reason)
        yield from steps_of_drafts(chunks, None)
        yield end


DIALECTS: dict[str, Dialect] = {"llama.cpp": LlamaCpp(), "vllm": Vllm(), "sglang": Sglang()}
