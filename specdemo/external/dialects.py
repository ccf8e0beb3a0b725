"""Dialects of other engines: requests of a streamed text, and steps from its recorded events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import AliasPath, BaseModel, ConfigDict, Field

from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Step
from specdemo.external.reported import Chunk, StepCounts, steps_of_drafts, steps_of_totals

RecordedEvent = tuple[float, str]  # seconds after the request, JSON
EndReason = Literal["stop", "length"]
Encode = Callable[[str], Sequence[int]]
_Number = Annotated[int, Field(ge=0, lt=1 << 31)]


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
