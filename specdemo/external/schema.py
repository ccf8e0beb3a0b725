"""Requests to other engines, and the used fields of their responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field

from specdemo.core.sampling import SamplingParams

_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Number = Annotated[int, Field(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class GenerationRequest:
    """Prompt and sampling of a request."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    seed: int


class _Response(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class ServedModel(_Response):
    """Entry of /v1/models."""

    id: Annotated[str, Field(max_length=400)]


class ServedModels(_Response):
    """Answer of /v1/models."""

    data: Annotated[list[ServedModel], Field(min_length=1)]


class Detokenized(_Response):
    """Answer of /detokenize: llama.cpp's field, or that of vLLM."""

    content: str | None = None
    prompt: str | None = None


class LlamaLogprob(_Response):
    """Log-probability of a token."""

    logprob: float


class Probe(_Response):
    """Answer of /v1/completions with the most probable tokens: a list of llama.cpp, or a mapping of other engines."""

    system_fingerprint: str | None = None
    top: Annotated[
        list[LlamaLogprob] | dict[str, float],
        Field(
            validation_alias=AliasChoices(
                AliasPath("choices", 0, "logprobs", "top_logprobs", 0),
                AliasPath("choices", 0, "logprobs", "content", 0, "top_logprobs"),
            )
        ),
    ] = []

    @property
    def margin(self) -> float | None:
        """Return the difference of the two largest log-probabilities; None if they are not reported."""
        values = self.top.values() if isinstance(self.top, dict) else [token.logprob for token in self.top]
        largest = sorted(values, reverse=True)[:2]
        return largest[0] - largest[1] if len(largest) == 2 else None


class LlamaTimings(_Response):
    """Totals of llama.cpp; the counts of drafts are absent before the first draft."""

    predicted_n: _Number
    draft_n: _Number = 0
    draft_n_accepted: _Number = 0


class LlamaChunk(_Response):
    """Event of llama.cpp's /completion with `return_tokens` and `timings_per_token`."""

    content: str = ""
    tokens: list[_Id] = []
    timings: LlamaTimings
    stop: bool = False
    stop_type: str = ""


class VllmDrafts(_Response):
    """Counts of vLLM per step with a draft; empty lists are omitted by vLLM."""

    num_spec_steps: _Number
    per_step_accepted: list[_Number] = []
    per_step_drafted: list[_Number] = []


class VllmMetrics(_Response):
    """Metrics of a request."""

    speculative_decoding: VllmDrafts | None = None


class VllmChoice(_Response):
    """New tokens of an answer."""

    token_ids: list[_Id] | None = None
    finish_reason: str | None = None


class VllmChunk(_Response):
    """Event of vLLM's /v1/completions with `return_token_ids`; the last one has the metrics."""

    choices: list[VllmChoice] = []
    metrics: VllmMetrics | None = None


class SglangReason(_Response):
    """Reason why a text ended."""

    type: str = ""


class SglangMeta(_Response):
    """Totals of SGLang; the counts of drafts are known at the end."""

    completion_tokens: _Number
    finish_reason: SglangReason | None = None
    spec_verify_ct: _Number | None = None
    spec_num_proposed_drafts: _Number | None = None


class SglangChunk(_Response):
    """Event of SGLang's /generate; `output_ids` are all tokens so far, or the new ones."""

    output_ids: list[_Id]
    meta_info: SglangMeta
