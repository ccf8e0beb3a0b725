"""Estimate the speed-up of a recipe before a run: decode prompts, and predict other draft lengths and other prompts."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdemo.core.errors import UserError
from specdemo.core.events import End, Header, StepEvent
from specdemo.core.metrics import Metrics, ratio_interval
from specdemo.core.policies import CostModel, costs_at_load
from specdemo.core.rules import RULES
from specdemo.core.sampling import SamplingParams
from specdemo.core.simulate import measured_costs, other_gammas, recorded_steps
from specdemo.core.step import Step
from specdemo.core.theory import STAGES, CostTerms, LengthEstimate, StepCost
from specdemo.drafters import METHODS
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt, alternate_classes
from specdemo.recipe import Recipe
from specdemo.worker import yield_device

MAX_GAMMA = 8  # longest estimated draft, unless that of the recipe is longer
MAX_TEXT_TOKENS = 512
MOST_TEXTS, LEAST_TEXTS = 10, 4  # of each half
DECODING_S = 10.0  # of each half
AR_STEPS = 20  # after each text
WARMUP_STEPS = 2  # the first of these, not counted
WORTHWHILE_SPEEDUP = 1.03
EXPENSIVE_DRAFT = 0.3  # value of c
SHORT_TEXT_TOKENS = 48  # of a visitor's own prompt
KNOWN_SHARE = 0.7  # progress after the prompts of a prediction, before the held-out ones
OWN = "this prompt"  # class of a visitor's own prompt


@dataclass(frozen=True)
class Estimate:
    """Figures of a draft length, with a 95 % interval of the speed-up."""

    gamma: int
    tokens_per_pass: float
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOut:
    """Speed-up of prompts that the prediction did not use, for a draft length that was not decoded before."""

    setting: str  # draft length or method
    prompts: int
    predicted: float
    measured: Estimate

    @property
    def error(self) -> float:
        return self.predicted - self.measured.speedup

    def __str__(self) -> str:
        interval = f"[{self.measured.low:.2f}, {self.measured.high:.2f}]"
        figures = f"predicted {self.predicted:.2f}x, measured {self.measured.speedup:.2f}x {interval}"
        prompts = "1 prompt" if self.prompts == 1 else f"{self.prompts} prompts"
        return f"{self.setting} on {prompts}: {figures}, error {self.error:+.2f}"


@dataclass(frozen=True)
class Preflight:
    """Prediction of a recipe's speed-up and memory use."""

    recipe: Recipe
    alpha: float  # acceptance per tested token
    c: float  # cost of a draft token, in AR passes
    v: dict[int, float]  # cost of a pass by number of rows, in AR passes
    estimates: tuple[Estimate, ...]  # an estimate per gamma, or one for methods and policies that choose lengths
    weight_bytes: int  # sum over models
    kv_bytes: int  # bytes of 1,000 tokens
    texts: str = ""  # origin of the texts
    tokens: int = 0  # most tokens of a text after its prompt
    held_out: HeldOut | None = None  # None if the held-out texts end at once

    @property
    def best(self) -> Estimate:
        return max(self.estimates, key=lambda estimate: estimate.speedup)

    def as_dict(self) -> dict[str, Any]:
        return {**json.loads(json.dumps(asdict(self))), "advice": self.advice}

    @property
    def advice(self) -> str:
        best = self.best
        if best.speedup < WORTHWHILE_SPEEDUP:
            cause = "drafting costs too much" if self.c > EXPENSIVE_DRAFT else "too few tokens would be accepted"
            return f"don't: at best {best.speedup:.2f}x the speed of AR decoding, because {cause}"
        doubt = "" if best.low > 1 else ", but possibly no difference"
        return f"{self.label(best)}: about {best.speedup:.2f}x the speed of AR decoding{doubt}"

    def label(self, estimate: Estimate) -> str:
        return f"gamma {estimate.gamma}" if len(self.estimates) > 1 else f"method {self.recipe.method}"


@dataclass(frozen=True)
class PreflightProgress:
    """Completed share of a prediction and its current stage."""

    share: float
    stage: str

    def __str__(self) -> str:
        return self.stage


@dataclass(frozen=True)
class DecodedRun:
    """Steps of a text, and AR steps after it."""

    header: Header
    steps: Sequence[Step]
    ar_steps: Sequence[Step]
    kv_bytes: float  # of 1,000 tokens

    @property
    def ar_s(self) -> float:
        return statistics.fmean(sum(step.seconds) for step in self.ar_steps)


def preflight(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Preflight:
    """Estimate `recipe`, chains for gamma 1 to `MAX_GAMMA`. Raises `UserError` if unsupported."""
    *_, result = predict(recipe, prompts, pool)
    assert isinstance(result, Preflight)
    return result


def predict(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[PreflightProgress | Preflight]:
    """Yield the progress of `preflight`, then its result."""
    if not METHODS[recipe.method].predictable:
        names = ", ".join(name for name, method in METHODS.items() if method.predictable)
        raise UserError(f"preflight supports the methods {names}, not {recipe.method}: run or bench it")
    yield PreflightProgress(0.0, "loading the models")
    known, others = halves(prompts)
    longest = max(MAX_GAMMA, recipe.gamma)
    runs: list[DecodedRun] = []
    for run in decoded_runs(fixed_length(recipe, longest), known, pool):
        runs.append(run)
        yield PreflightProgress(KNOWN_SHARE * len(runs) / max(len(runs), len(known)), f"decoding {_names(known)}")
    result = prediction_of_runs(recipe, runs)
    yield PreflightProgress(KNOWN_SHARE, f"measuring other prompts ({_names(others)})")
    gamma = min(recipe.gamma, longest - 1)  # was not decoded
    predicted = next((row for row in result.estimates if row.gamma == gamma), result.best)
    held_out = [*decoded_runs(fixed_length(recipe, gamma), others, pool)]
    yield replace(
        result,
        texts=f"{len(runs)} decoded with {recipe.method}, {_settings(recipe)} ({_names(known)})",
        held_out=compare_held_out(result.label(predicted), predicted, held_out),
    )


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Split the prompts of each class; of single prompts only the draft length is held out."""
    kinds = {prompt.kind: [other for other in prompts if other.kind == prompt.kind] for prompt in prompts}
    known = [prompt for group in kinds.values() for prompt in group[::2]]
    return known, [prompt for group in kinds.values() for prompt in group[1::2]] or known


def has_lengths(recipe: Recipe) -> bool:
    """Return True for chains of a fixed, replaceable length."""
    method = METHODS[recipe.method]
    return method.shape == "chain" and method.uses_policy and recipe.policy == "fixed"


def fixed_length(recipe: Recipe, gamma: int) -> Recipe:
    """Return the recipe with another draft length, if it has lengths."""
    return replace(recipe, gamma=gamma) if has_lengths(recipe) else recipe


def decoded_runs(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    pool: ModelPool,
    most: int = MOST_TEXTS,
    seconds: float = DECODING_S,
) -> Iterator[DecodedRun]:
    """Decode up to `most` prompts of alternating classes, fewer after `seconds`; omit empty texts."""
    most_tokens = min(recipe.max_tokens, MAX_TEXT_TOKENS)
    recipe = replace(recipe, max_tokens=most_tokens, ngram_keep=False, cloud=None, external=None)
    ar = replace(recipe, method="ar", max_tokens=1 + WARMUP_STEPS + AR_STEPS)
    began = time.perf_counter()
    for seed, prompt in enumerate(alternate_classes(prompts)[:most]):
        if seed >= LEAST_TEXTS and time.perf_counter() - began > seconds:
            return
        header, events = _decoded(replace(recipe, seed=seed), prompt, pool)
        _, ar_events = _decoded(ar, prompt, pool)
        steps = [event.step for event in events]
        ar_steps = [event.step for event in ar_events[1 + WARMUP_STEPS :]]
        if len(steps) > 1 and ar_steps:
            read = len(header.prompt_tokens) + sum(len(step.tokens) for step in steps[:-1]) + steps[-1].draft.size
            yield DecodedRun(header, steps, ar_steps, 1000 * (events[-1].memory.kv or 0) / read)


def _decoded(recipe: Recipe, prompt: Prompt, pool: ModelPool) -> tuple[Header, list[StepEvent]]:
    headers: list[Header] = []
    steps: list[StepEvent] = []
    for event in generate(recipe, prompt.text, pool):
        yield_device()
        match event:
            case Header():
                headers.append(event)
            case StepEvent():
                steps.append(event)
            case End(reason="error"):
                raise UserError(str(event.error))
    return headers[0], steps


def measured_speed(gamma: int, runs: Sequence[DecodedRun]) -> Estimate:
    """Return the speed-up of `runs` over the AR steps after each; the interval resamples runs, or steps of one run."""
    decoding = [(run, [run.steps[1:]] if len(runs) > 1 else [[step] for step in run.steps[1:]]) for run in runs]
    costs = [
        (sum(len(step.tokens) for step in steps), sum(sum(step.seconds) for step in steps) / run.ar_s)
        for run, parts in decoding
        for steps in parts
    ]
    tokens, cost = map(sum, zip(*costs, strict=True))
    steps = sum(len(run.steps) - 1 for run in runs)
    return Estimate(gamma, tokens / steps, tokens / cost, *ratio_interval(costs))


def compare_held_out(setting: str, predicted: Estimate, runs: Sequence[DecodedRun]) -> HeldOut | None:
    """Compare predicted and measured speed-up; None without runs."""
    if not runs:
        return None
    return HeldOut(setting, len(runs), predicted.speedup, measured_speed(predicted.gamma, runs))


def prediction_of_runs(recipe: Recipe, runs: Sequence[DecodedRun]) -> Preflight:
    """Predict from runs of `recipe`, with the longest drafts for recipes with lengths."""
    if not runs:
        raise UserError("the target ends these texts at once: provide other prompts")
    metrics = [Metrics.of(run.steps) for run in runs]
    ar_s = statistics.fmean(run.ar_s for run in runs)
    if has_lengths(recipe):
        cost, estimates = _estimated_lengths(recipe, runs, ar_s)
        c = cost.token / ar_s
        v = {estimate.gamma + 1: cost.verify(estimate.gamma + 1) / ar_s for estimate in estimates}
    else:
        seconds = (sum(getattr(m, name) for m in metrics) for name in STAGES)
        drafted, steps = (sum(getattr(m, name) for m in metrics) for name in ("drafted", "decode_steps"))
        terms = CostTerms.of(*seconds, drafted=drafted, steps=steps, pass_s=ar_s)
        c = terms.c
        v = {round(1 + terms.drafted): terms.v}
        estimates = [measured_speed(recipe.gamma, runs)]
    tested = sum(m.tested for m in metrics)
    alpha = sum(sum(m.accepted_by_position) for m in metrics) / max(1, tested)
    tokens = max(m.tokens for m in metrics)
    environment = runs[0].header.environment
    weights = environment["target_bytes"] + (environment["drafter_bytes"] or 0)
    kv_bytes = round(max(run.kv_bytes for run in runs))
    return Preflight(recipe, alpha, c, {1: 1.0, **v}, tuple(estimates), weights, kv_bytes, tokens=tokens)


def _estimated_lengths(recipe: Recipe, runs: Sequence[DecodedRun], ar_s: float) -> tuple[StepCost, list[Estimate]]:
    """Return the costs in seconds and the estimates of all draft lengths."""
    costs = costs_at_load(runs[0].header.environment) or CostModel()
    rule, gammas = RULES[recipe.rule], range(1, max(MAX_GAMMA, recipe.gamma) + 1)
    counted = not (rule.overlaps or rule.chains_only)
    ar_steps = [step for run in runs for step in run.ar_steps]
    rows = other_gammas([run.steps for run in runs], gammas, costs.verify, ar_steps, counted=counted)
    if not rows:  # nothing was drafted
        rows = [LengthEstimate(gamma, 1.0, 1 / ar_s, 1 / ar_s, 1 / ar_s) for gamma in gammas]
    recorded = [step for run in runs for step in recorded_steps(run.steps)]
    cost = measured_costs(recorded, costs.verify, statistics.fmean(step.seconds.verify for step in ar_steps))
    speeds = [(row.speed * ar_s, row.low * ar_s, row.high * ar_s) for row in rows]
    return cost, [Estimate(row.gamma, row.tokens_per_pass, *speed) for row, speed in zip(rows, speeds, strict=True)]


def _names(prompts: Sequence[Prompt]) -> str:
    return ", ".join(dict.fromkeys(prompt.kind for prompt in prompts))


def _settings(recipe: Recipe) -> str:
    limits = SamplingParams.of(recipe).truncation if recipe.temperature else {}
    values = {"temperature": recipe.temperature, **limits}
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in values.items())
