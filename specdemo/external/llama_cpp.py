"""Dialect of llama.cpp's server: a chunk per token, with the totals of drafted and accepted tokens."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from specdemo.core.step import Step
from specdemo.external.dialect import CUT_OFF, Dialect, Encode, EndReason, RecordedEvent
from specdemo.external.reported import Chunk, StepCounts, steps_of_totals
from specdemo.external.schema import GenerationRequest, LlamaChunk


class LlamaCpp(Dialect):
    """llama.cpp's /completion."""

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

    def steps(self, events: Iterable[RecordedEvent], encode: Encode) -> Generator[Step, None, EndReason]:
        reason: EndReason | None = None

        def chunks() -> Iterator[tuple[Chunk, StepCounts]]:
            nonlocal reason
            known = 0
            for t, text in events:
                chunk = LlamaChunk.model_validate_json(text)
                timings = chunk.timings
                if chunk.stop:
                    reason = "length" if chunk.stop_type == "limit" else "stop"
                if not chunk.tokens:
                    continue
                tokens = tuple(chunk.tokens)
                if (hidden := timings.predicted_n - known - len(tokens)) > 0:
                    tokens = _with_hidden(tokens, hidden, encode(chunk.content))
                known = timings.predicted_n
                yield Chunk(t, tokens), StepCounts(timings.draft_n_accepted, timings.draft_n)

        yield from steps_of_totals(chunks())
        if reason is None:
            raise ValueError(CUT_OFF)
        return reason


def _with_hidden(tokens: tuple[int, ...], hidden: int, encoded: Iterable[int]) -> tuple[int, ...]:
    """Return `tokens` after the unreported tokens of an incomplete character."""
    complete = tuple(encoded)
    if len(complete) != hidden + len(tokens) or complete[hidden:] != tokens:
        raise ValueError("the tokens of a character are not reported")
    return complete
