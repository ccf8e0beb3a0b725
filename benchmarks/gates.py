"""What a gate's threshold saves and costs: ``python -m benchmarks.gates``.

Thresholds are percentiles of each signal over what the drafter drafts on one half of the prompts (the practice guide
takes the 80th of the NLL); the curve is of the other half. Calls saved are against asking about every draft. Agreement
is the share of tokens that are the target's own first choice where they stand; beta is the mean of sum min(p, q) over
the text, 1 for a token that the target judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdemo.core.decode import Verifier, decode
from specdemo.core.step import Draft, Step, Verdict
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.model_variants import with_dropout
from specdemo.pipeline import PASSES, build_pipeline
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.gates import GatedVerifier, RecordingPolicy, mc_dropout, signals

PERCENTILES = (20, 40, 60, 80, 90, 95)
NAMES = ("nll", "entropy", "margin", "variance")


class Here:
    """The target at hand in the cloud's place; it keeps what the drafts looked like."""

    def __init__(self, verifier: Verifier, gauge: RecordingPolicy, variance: Any) -> None:
        self._verifier, self._gauge, self._variance = verifier, gauge, variance
        self.seen: dict[str, list[float]] = {name: [] for name in NAMES}

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        """The target's verdict."""
        if draft.tokens:
            for name, values in signals(self._gauge.log_probs, draft).items():
                self.seen[name] += values
            self.seen["variance"] += self._variance(tokens, draft)
        return self._verifier.verify(tokens, draft)

    def close(self) -> None:
        """Nothing to hang up."""


@dataclass(frozen=True)
class Point:
    """One threshold of one signal."""

    signal: str
    percentile: int
    threshold: float
    saved: float  # of the calls that asking about every draft takes, per token
    agreement: float
    beta: float


class Study:
    """The bundled pair, or another, and how it decodes behind a gate."""

    def __init__(self, recipe: Recipe, pool: ModelPool, most_hard: float) -> None:
        assert recipe.drafter_spec is not None
        self._recipe, self._most_hard = recipe, most_hard
        self._target, self._drafter = pool.take(recipe.target_spec), pool.take(recipe.drafter_spec)
        self._variance = mc_dropout(
            [CachedModel(with_dropout(self._drafter.model, seed)).score for seed in range(PASSES)]
        )

    def run(self, text: str, thresholds: Mapping[str, float]) -> tuple[list[int], list[Step], Here]:
        """The prompt's tokens, the steps behind the gate, and what it saw."""
        pipeline = build_pipeline(self._recipe, self._target, self._drafter)
        gauge = RecordingPolicy(pipeline.policy)
        here = Here(pipeline.verifier, gauge, self._variance)
        variance = self._variance if "variance" in thresholds else None
        verifier = GatedVerifier(here, gauge, thresholds, self._most_hard, variance=variance)
        tokens = self._target.tokenizer.encode(text)
        most = min(self._recipe.max_tokens, pipeline.context - len(tokens))
        return (
            tokens,
            list(
                decode(
                    tokens,
                    verifier,
                    pipeline.drafter,
                    gauge,
                    max_tokens=most,
                    stop=self._target.stop,
                    clock=lambda: 0.0,
                )
            ),
            here,
        )

    def calibrate(self, prompts: Sequence[Prompt]) -> dict[str, list[float]]:
        """Each signal over every drafted token, sorted; every draft is judged."""
        seen: dict[str, list[float]] = {name: [] for name in NAMES}
        for prompt in prompts:
            _, _, here = self.run(prompt.text, {"nll": -1.0})
            for name, values in here.seen.items():
                seen[name] += values
        return {name: sorted(values) for name, values in seen.items()}

    def measure(self, prompts: Sequence[Prompt], thresholds: Mapping[str, float]) -> tuple[float, float, float]:
        """Calls per token, agreement, beta."""
        calls = tokens = 0
        right: list[float] = []
        betas: list[float] = []
        for prompt in prompts:
            before, steps, _ = self.run(prompt.text, thresholds)
            new = [token for step in steps for token in step.tokens]
            judged = [step.verdict.notes.get("escalated", 1.0) > 0 for step in steps for _ in step.tokens]
            p, q = (_laws(model, [*before, *new])[len(before) - 1 : -1] for model in (self._target, self._drafter))
            right += (p.argmax(-1) == torch.tensor(new)).float().tolist()
            overlap = torch.minimum(p, q).sum(-1).tolist()
            betas += [1.0 if ours else beta for ours, beta in zip(judged, overlap, strict=True)]
            calls += sum(step.verdict.notes.get("escalated", 1.0) > 0 for step in steps[1:])
            tokens += len(new)
        return calls / tokens, statistics.mean(right), statistics.mean(betas)


def _laws(model: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Raw laws after each of `tokens`, `[n, vocab]`."""
    return CachedModel(model.model).read(tokens).float().softmax(-1).cpu()


def curve(study: Study, valid: Sequence[Prompt], held_out: Sequence[Prompt]) -> Iterator[Point]:
    """A point per signal and percentile, and the two ends: ask about everything, ask about nothing."""
    seen = study.calibrate(valid)
    always, agreement, beta = study.measure(held_out, {"nll": -1.0})
    yield Point("always ask", 0, 0.0, 0.0, agreement, beta)
    for name in NAMES:
        for percentile in PERCENTILES:
            share = (100 - percentile if name == "margin" else percentile) / 100
            threshold = seen[name][min(len(seen[name]) - 1, int(share * len(seen[name])))]
            calls, agreement, beta = study.measure(held_out, {name: threshold})
            yield Point(name, percentile, threshold, 1 - calls / always, agreement, beta)
    calls, agreement, beta = study.measure(held_out, {"nll": float("inf")})
    yield Point("never ask", 100, 0.0, 1 - calls / always, agreement, beta)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the curve, and a JSON line."""
    parser = argparse.ArgumentParser(prog="benchmarks.gates")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--ratio", type=float, default=0.3, help="of a draft that may be hard")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=24, help="of the class of code, half of them held out")
    options = parser.parse_args(arguments)
    recipe = Recipe(
        temperature=options.temperature, top_p=1.0, gamma=options.gamma, max_tokens=options.max_tokens, device="cpu"
    )
    prompts = load_prompts(kinds=["code"])[: options.prompts]
    points = []
    print("| signal | percentile | threshold | calls saved | agreement | mean beta |\n|---|---|---|---|---|---|")
    for point in curve(Study(recipe, ModelPool(), options.ratio), prompts[::2], prompts[1::2]):
        points.append(point)
        print(
            f"| {point.signal} | {point.percentile} | {point.threshold:.4g} | {point.saved:.0%} "
            f"| {point.agreement:.3f} | {point.beta:.3f} |",
            flush=True,
        )
    print(json.dumps({"gates": [vars(point) for point in points]}))


if __name__ == "__main__":
    main()
