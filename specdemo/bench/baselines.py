"""Baselines: `generate` of transformers on the same weights."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import set_seed
from transformers.generation.streamers import BaseStreamer

from specdemo.core.errors import UserError
from specdemo.models.engines.generic import has_encoder
from specdemo.models.load import load_with_transformers
from specdemo.models.memory_plan import check_memory, plan_spec
from specdemo.models.spec import ModelSpec


@dataclass(frozen=True)
class Baseline:
    """Arguments of `generate` and settings of the assistant."""

    title: str
    family: str  # only its fastest setting is reported
    arguments: dict[str, Any] = field(default_factory=dict)
    assistant: dict[str, Any] | None = None


def _assisted(schedule: str, threshold: float) -> Baseline:
    settings = {"num_assistant_tokens_schedule": schedule, "assistant_confidence_threshold": threshold}
    return Baseline(f"assisted {schedule} {threshold:g}", "assisted", assistant=settings)


BASELINES = {
    baseline.title: baseline
    for baseline in (
        Baseline("generate", "generate"),
        _assisted("constant", 0.0),
        _assisted("constant", 0.4),
        _assisted("heuristic", 0.0),
        _assisted("heuristic", 0.4),
        Baseline("prompt lookup 4", "prompt lookup", {"prompt_lookup_num_tokens": 4}),
        Baseline("prompt lookup 10", "prompt lookup", {"prompt_lookup_num_tokens": 10}),
    )
}


class TokenClock(BaseStreamer):
    """Time and size of every batch of tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Required by transformers."""


class Baselines:
    """A pair loaded by transformers. Raises `UserError` if memory is short."""

    def __init__(self, target: ModelSpec, drafter: ModelSpec | None) -> None:
        check_memory([plan_spec(spec.resolved(), 0) for spec in (target, drafter) if spec is not None])
        self._target, self._tokenizer = load_with_transformers(target)
        if has_encoder(self._target.config):
            raise UserError(f"the transformers baselines do not support encoder-decoders ({target.name}): omit --peers")
        self._drafter = load_with_transformers(drafter)[0] if drafter else None

    def run(
        self, baseline: Baseline, text: str, temperature: float, gamma: int, max_tokens: int, seed: int
    ) -> dict[str, Any]:
        """Continue `text`; return its tokens and the figures measurable outside `generate`."""
        ids = self._tokenizer(text, return_tensors="pt").input_ids.to(self._target.device)
        free_positions = self._target.config.max_position_embeddings - ids.shape[1]
        arguments: dict[str, Any] = dict(baseline.arguments)
        if temperature > 0:
            arguments |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        else:
            arguments |= {"do_sample": False}
        if baseline.assistant is not None:
            assert self._drafter is not None
            for name, value in {**baseline.assistant, "num_assistant_tokens": gamma}.items():
                setattr(self._drafter.generation_config, name, value)
            arguments["assistant_model"] = self._drafter
        clock = TokenClock()
        set_seed(seed)
        generate: Any = self._target.generate  # a method of all loaded models, unknown to the type checker
        start = time.perf_counter()
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(max_tokens, free_positions),
            streamer=clock,
            pad_token_id=self._tokenizer.eos_token_id,
            **arguments,
        )
        tokens = output[0, ids.shape[1] :].tolist()
        first, wall = clock.times[1], time.perf_counter() - clock.times[1]
        decoded = len(tokens) - clock.counts[1]
        return {
            "text": tokens,
            "tokens": len(tokens),
            "ttft_s": first - start,
            "wall_s": wall,
            "tokens_per_second": decoded / wall if decoded else None,
            "tokens_per_target_pass": decoded / (len(clock.times) - 2) if len(clock.times) > 2 else None,
        }
