"""Saved cloud calls and lost quality by threshold of a gate: table `gates` in docs/edge-cloud.md.

`python -m benchmarks.gates --write`. Thresholds are percentiles of each signal over the
draft tokens of half of the prompts (the practice guide uses the 80th of the NLL); figures are measured on the other
half. Saved calls are relative to verifying every draft. Agreement is the share of tokens that are the target's first
choice; beta is the mean of sum min(p, q), 1 for tokens verified by the target.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.runs import percentile
from benchmarks.tables import publish, run_study, study_parser
from specdemo.core.decode import Verifier, decode
from specdemo.core.step import Draft, Step, Verdict
from specdemo.models.engines.llama_weights import with_dropout
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import build_pipeline
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.gates import PASSES, GatedVerifier, RecordingPolicy, mc_dropout, signals

TABLES = {"gates": "docs/edge-cloud.md"}
PERCENTILES = (40, 80, 95)
SIGNAL_NAMES = ("nll", "entropy", "margin", "variance")
COLUMNS = {
    "signal": "{signal}",
    "percentile": "{percentile}",
    "threshold": "{threshold:.4g}",
    "calls saved": "{saved:.0%}",
    "agreement": "{agreement:.3f}",
    "mean beta": "{beta:.3f}",
}


class LocalTarget:
    """Local verifier in place of the cloud that records the signals of all drafts."""

    def __init__(self, verifier: Verifier, policy: RecordingPolicy, variance: Any) -> None:
        self._verifier, self._policy, self._variance = verifier, policy, variance
        self.signals: dict[str, list[float]] = {name: [] for name in SIGNAL_NAMES}

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        """Record the signals and verify."""
        if draft.tokens:
            for name, values in signals(self._policy.log_probs, draft).items():
                self.signals[name] += values
            self.signals["variance"] += self._variance(tokens, draft)
        return self._verifier.verify(tokens, draft)


class GateStudy:
    """Decoding with the bundled pair and a gate."""

    def __init__(self, recipe: Recipe, pool: ModelPool, max_hard_share: float) -> None:
        assert recipe.drafter_spec is not None
        self._recipe, self._max_hard_share = recipe, max_hard_share
        self._target, self._drafter = pool.take(recipe.target_spec), pool.take(recipe.drafter_spec)
        variants = [with_dropout(self._drafter.model, seed) for seed in range(PASSES)]
        self._variance = mc_dropout([CachedModel(model).score for model in variants])

    def run(self, text: str, thresholds: Mapping[str, float]) -> tuple[list[int], list[Step], LocalTarget]:
        """Return the prompt's tokens, the steps, and the target with the recorded signals."""
        pipeline = build_pipeline(self._recipe, self._target, self._drafter)
        policy = RecordingPolicy(pipeline.policy)
        target = LocalTarget(pipeline.verifier, policy, self._variance)
        variance = self._variance if "variance" in thresholds else None
        verifier = GatedVerifier(target, policy, thresholds, self._max_hard_share, variance=variance)
        tokens = self._target.tokenizer.encode(text)
        limits = {
            "max_tokens": min(self._recipe.max_tokens, pipeline.context - len(tokens)),
            "stop": self._target.stop,
            "clock": lambda: 0.0,
        }
        return tokens, list(decode(tokens, verifier, pipeline.drafter, policy, **limits)), target

    def calibrate(self, prompts: Sequence[Prompt]) -> dict[str, list[float]]:
        """Return the values of each signal over all draft tokens when every draft is verified."""
        values: dict[str, list[float]] = {name: [] for name in SIGNAL_NAMES}
        for prompt in prompts:
            _, _, target = self.run(prompt.text, {"nll": -1.0})
            for name in values:
                values[name] += target.signals[name]
        return values

    def measure(self, prompts: Sequence[Prompt], thresholds: Mapping[str, float]) -> tuple[float, float, float]:
        """Return calls per token, agreement and mean beta."""
        calls = tokens = 0
        agreement: list[float] = []
        betas: list[float] = []
        for prompt in prompts:
            prompt_tokens, steps, _ = self.run(prompt.text, thresholds)
            new = [token for step in steps for token in step.tokens]
            escalated = [not step.unverified for step in steps]
            verified = [flag for flag, step in zip(escalated, steps, strict=True) for _ in step.tokens]
            p, q = (
                _distributions(model, [*prompt_tokens, *new])[len(prompt_tokens) - 1 : -1]
                for model in (self._target, self._drafter)
            )
            agreement += (p.argmax(-1) == torch.tensor(new)).float().tolist()
            overlap = torch.minimum(p, q).sum(-1).tolist()
            betas += [1.0 if by_target else beta for by_target, beta in zip(verified, overlap, strict=True)]
            calls += sum(escalated[1:])
            tokens += len(new)
        return calls / tokens, statistics.mean(agreement), statistics.mean(betas)


def _distributions(model: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    return CachedModel(model.model).read(tokens).float().softmax(-1).cpu()


def curve(gate: GateStudy, calibration: Sequence[Prompt], held_out: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
    """Yield a record per signal and percentile, and for the limits of always and never calling the target."""
    values = gate.calibrate(calibration)
    points = [("verify always", 0, {"nll": -1.0})]
    for name in SIGNAL_NAMES:
        for percent in PERCENTILES:
            share = (100 - percent if name == "margin" else percent) / 100
            points.append((name, percent, {name: percentile(values[name], share)}))
    points.append(("verify never", 100, {"nll": float("inf")}))
    always = 0.0
    for name, percent, thresholds in points:
        calls, agreement, beta = gate.measure(held_out, thresholds)
        always = always or calls  # of the first point
        threshold = thresholds.get(name, 0.0)
        figures = {"saved": 1 - calls / always, "agreement": agreement, "beta": beta}
        yield {"signal": name, "percentile": percent, "threshold": threshold, **figures}


def study(options: argparse.Namespace) -> None:
    """Measure and publish the table."""
    settings = {name: getattr(options, name) for name in ("temperature", "gamma", "max_tokens")}
    recipe = Recipe(**settings, top_p=1.0, device="cpu")
    prompts = load_prompts(kinds=["code"])[: options.prompts]
    gate = GateStudy(recipe, ModelPool(), options.ratio)
    publish(options, "gates", COLUMNS, list(curve(gate, prompts[::2], prompts[1::2])))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--ratio", type=float, default=0.3, help="share of hard tokens that requires a call")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=12, help="prompts of class code, half for calibration")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
