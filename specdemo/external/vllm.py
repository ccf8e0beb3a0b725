"""Dialect of vLLM (>= 0.29 with `--per-request-spec-decode-metrics detailed`): counts per step at the end of a text."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any

from specdemo.core.step import Step
from specdemo.external.dialect import CUT_OFF, Dialect, Encode, EndReason, RecordedEvent
from specdemo.external.reported import Chunk, StepCounts, steps_of_drafts
from specdemo.external.schema import GenerationRequest, VllmChunk


class Vllm(Dialect):
    """vLLM's /v1/completions."""

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

    def steps(self, events: Iterable[RecordedEvent], encode: Encode) -> Generator[Step, None, EndReason]:
        chunks: list[Chunk] = []
        drafts, reason = None, None
        for t, text in events:
            chunk = VllmChunk.model_validate_json(text)
            for choice in chunk.choices:
                chunks.append(Chunk(t, tuple(choice.token_ids or ())))
                reason = choice.finish_reason or reason
            counts = chunk.metrics and chunk.metrics.speculative_decoding
            if counts and counts.num_spec_steps == len(counts.per_step_accepted):
                pairs = zip(counts.per_step_accepted, counts.per_step_drafted, strict=True)
                drafts = [StepCounts(accepted, drafted) for accepted, drafted in pairs]
        if reason is None:
            raise ValueError(CUT_OFF)
        yield from steps_of_drafts(chunks, drafts)
        return "stop" if reason == "stop" else "length"
