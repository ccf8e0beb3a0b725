"""Dialect of SGLang, from its documented fields; not run against a server."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from specdemo.core.step import Step
from specdemo.external.dialect import CUT_OFF, Dialect, Encode, EndReason, RecordedEvent
from specdemo.external.reported import Chunk, StepCounts, steps_of_drafts
from specdemo.external.schema import GenerationRequest, SglangChunk, SglangMeta


class Sglang(Dialect):
    """SGLang's /generate: a chunk per step, and totals at the end of a text."""

    path, can_detokenize = "/generate", False

    def body(self, request: GenerationRequest, model: str) -> Mapping[str, Any]:
        sampling = {
            **request.sampling.numbers,
            "top_k": request.sampling.top_k or -1,
            "max_new_tokens": request.max_tokens,
            "sampling_seed": request.seed,
        }
        return {
            "input_ids": list(request.prompt),
            "sampling_params": sampling,
            "stream": True,
            "return_spec_tokens_details": True,
        }

    def steps(self, events: Iterable[RecordedEvent], encode: Encode) -> Generator[Step, None, EndReason]:
        chunks: list[Chunk] = []
        known, meta = 0, SglangMeta(completion_tokens=0)
        for t, text in events:
            chunk = SglangChunk.model_validate_json(text)
            meta, ids = chunk.meta_info, chunk.output_ids
            new = ids[known:] if len(ids) == meta.completion_tokens else ids
            chunks.append(Chunk(t, tuple(new)))
            known += len(new)
        if meta.finish_reason is None:
            raise ValueError(CUT_OFF)
        yield from steps_of_drafts(chunks, _drafts(chunks, meta))
        return "stop" if meta.finish_reason.type == "stop" else "length"


def _drafts(chunks: Sequence[Chunk], meta: SglangMeta) -> list[StepCounts] | None:
    """Return the counts of each step if every chunk after the first is a step with a draft of equal length."""
    steps, proposed = meta.spec_verify_ct, meta.spec_num_proposed_drafts
    accepted = [len(chunk.tokens) - 1 for chunk in chunks[1:] if chunk.tokens]
    if not chunks or len(chunks[0].tokens) != 1 or not steps or proposed is None:
        return None
    if len(accepted) != steps or proposed % steps or proposed // steps < max(accepted):
        return None
    return [StepCounts(count, proposed // steps) for count in accepted]
