"""Estimate the speed-up of a recipe before a run: decode prompts, and predict other draft lengths and other prompts."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdemo.core.decode import decode
from specdemo.core.errors import UserError
from specdemo.core.estimate import ExpectedSteps, acceptance_along_text
from specdemo.core.metrics import Metrics, ratio_interval
from specdemo.core.policies import CostModel
from specdemo.core.rules import RULES
from specdemo.core.sampling import SamplingParams
from specdemo.core.simulate import draft_chances, measured_costs, recorded_steps
from specdemo.core.step import Step
from specdemo.core.theory import STAGES, CostTerms
from specdemo.drafters import METHODS
from specdemo.models.chat_prompt import read_prompt
from specdemo.models.heads import LoadedDrafter
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import Pipeline, build_pipeline
from specdemo.plan import plan_run
from specdemo.prompts import Prompt, alternate_classes
from specdemo.recipe import Recipe
from specdemo.worker import yield_device

MAX_GAMMA = 8  # longest estimated draft, unless that of the recipe is longer
MAX_TEXT_TOKENS = 512
MOST_TEXTS, LEAST_TEXTS = 12, 4
DECODING_S = 12.0
HELD_OUT_TEXTS, HELD_OUT_S = 6, 6.0  # limits of the measurement
AR_STEPS = 20  # after each text
WARMUP_STEPS = 2  # the first of these, not counted
WORTHWHILE_SPEEDUP = 1.03
EXPENSIVE_DRAFT = 0.3  # value of c
SHORT_TEXT_TOKENS = 48  # of a visitor's own prompt
OWN = "this prompt"  # class of a visitor's own prompt
BLOCK_TOKENS = 8  # unit of the interval if there is a single text; shorter in texts of fewer than four units

Totals = tuple[float, float, float]  # tokens, steps, seconds in AR steps


@dataclass(frozen=True)
class Estimate:
    """Totals over texts; 95 % interval of the speed-up."""

    gamma: int
    tokens_per_pass: float
    speedup: float
    low: float
    high: float

    @classmethod
    def of(cls, gamma: int, texts: Sequence[Totals]) -> Estimate:
        """Combine the totals of each text, or of each part of a single text."""
        tokens, steps, cost = map(sum, zip(*texts, strict=True))
        interval = ratio_interval([(text[0], text[2]) for text in texts])
        return cls(gamma, tokens / steps, tokens / cost, *interval)


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
        return f"{self.setting} on {self.prompts} prompts: {figures}, error {self.error:+.2f}"


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

    steps: Sequence[Step]
    ar_steps: Sequence[Step]
    kv_bytes: int

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
    if not METHODS[recipe.method].preflight:
        names = ", ".join(name for name, method in METHODS.items() if method.preflight)
        raise UserError(f"preflight supports the methods {names}, not {recipe.method}: run or bench it")
    yield PreflightProgress(0.0, "loading the models")
    target, drafter, pipeline = load_comparable(recipe, pool)
    known, others = halves(prompts)
    longest = max(MAX_GAMMA, recipe.gamma)
    drafting = fixed_length(recipe, longest) if has_lengths(recipe) else recipe
    runs: list[DecodedRun] = []
    with pipeline:
        for run in decoded_runs(drafting, target, drafter, known, pipeline.shared_context):
            runs.append(run)
            yield PreflightProgress(0.7 * len(runs) / max(len(runs), len(known)), f"decoding {_names(known)}")
        result = prediction_of_runs(recipe, runs, target.pass_costs)
        yield PreflightProgress(0.7, f"measuring other prompts ({_names(others)})")
        gamma = min(recipe.gamma, longest - 1)  # was not decoded
        predicted = next((row for row in result.estimates if row.gamma == gamma), result.best)
        drafting = fixed_length(recipe, gamma) if has_lengths(recipe) else recipe
        held_out = [*held_out_runs(drafting, target, drafter, others, pipeline.shared_context)]
    yield replace(
        result,
        weight_bytes=target.weight_bytes + (drafter.weight_bytes if drafter else 0),
        texts=f"{len(runs)} decoded with {recipe.method}, {_settings(recipe)} ({_names(known)})",
        held_out=compare_held_out(result.label(predicted), predicted, held_out),
    )


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Split the prompts of each class; of single prompts only the draft length is held out."""
    kinds = {prompt.kind: [other for other in prompts if other.kind == prompt.kind] for prompt in prompts}
    known = [prompt for group in kinds.values() for prompt in group[::2]]
    return known, [prompt for group in kinds.values() for prompt in group[1::2]] or known


def has_lengths(recipe: Recipe) -> bool:
    """Return True for chains of a fixed length, which other lengths may replace."""
    method = METHODS[recipe.method]
    return method.shape == "chain" and method.uses_policy and recipe.policy == "fixed"


def fixed_length(recipe: Recipe, gamma: int) -> Recipe:
    return replace(recipe, gamma=gamma, policy="fixed", gamma_min=None, gamma_max=None)


def load_comparable(recipe: Recipe, pool: ModelPool) -> tuple[LoadedModel, LoadedDrafter | None, Pipeline]:
    """Return target, drafter and pipeline. Raises `UserError` for models with an encoder."""
    plan = plan_run(recipe)
    if recipe.encoder or pool.get(plan.target).encoder:
        raise UserError("preflight does not support encoder-decoders: run or bench the recipe")
    target = pool.get(plan.target)
    drafter: LoadedDrafter | None = pool.get(plan.drafter) if plan.drafter else None
    if plan.head:
        drafter = pool.get_head(plan.head)
    return target, drafter, build_pipeline(plan, target, drafter)


def decoded_runs(
    recipe: Recipe,
    target: LoadedModel,
    drafter: LoadedDrafter | None,
    prompts: Sequence[Prompt],
    context: int,
    most: int = MOST_TEXTS,
    seconds: float = DECODING_S,
) -> Iterator[DecodedRun]:
    """Decode up to `most` prompts of alternating classes, fewer after `seconds`; omit texts that end at once."""
    ar, began = replace(recipe, method="ar", cloud=None), time.perf_counter()
    room = recipe.gamma + 1
    for seed, prompt in enumerate(alternate_classes(prompts)[:most]):
        if seed >= LEAST_TEXTS and time.perf_counter() - began > seconds:
            return
        inputs = (prompt.text, recipe.chat, target.vocab_size, recipe.template_options)
        tokens = read_prompt(target.tokenizer, *inputs).tokens[: min(MAX_TEXT_TOKENS, context - 2 * room)]
        most_tokens = min(recipe.max_tokens, MAX_TEXT_TOKENS, context - len(tokens) - room)
        with build_pipeline(plan_run(replace(recipe, seed=seed)), target, drafter) as pipeline:
            steps = _decoded(pipeline, tokens, most_tokens)
            kv_bytes = round(1000 * pipeline.position_bytes)
        with build_pipeline(plan_run(ar), target, None) as baseline:
            ar_steps = _decoded(baseline, tokens, 1 + WARMUP_STEPS + AR_STEPS)[1 + WARMUP_STEPS :]
        if len(steps) > 1 and ar_steps:
            yield DecodedRun(steps, ar_steps, kv_bytes)


def _decoded(pipeline: Pipeline, tokens: Sequence[int], count: int) -> list[Step]:
    roles = pipeline.verifier, pipeline.drafter, pipeline.policy
    steps = []
    for step in decode(tokens, *roles, max_tokens=count, stop=pipeline.stop, clock=time.perf_counter):
        steps.append(step)
        yield_device()
    return steps


def held_out_runs(
    recipe: Recipe, target: LoadedModel, drafter: LoadedDrafter | None, prompts: Sequence[Prompt], context: int
) -> Iterator[DecodedRun]:
    return decoded_runs(recipe, target, drafter, prompts, context, HELD_OUT_TEXTS, HELD_OUT_S)


def measured_speed(gamma: int, runs: Sequence[DecodedRun]) -> Estimate:
    """Return the speed-up of `runs` over the AR steps after each."""
    metrics = [Metrics.of(run.steps) for run in runs]
    totals: list[Totals] = [
        (m.decode_tokens, m.decode_steps, m.decode_s / run.ar_s) for m, run in zip(metrics, runs, strict=True)
    ]
    if len(runs) == 1:
        totals = [(len(step.tokens), 1, sum(step.seconds) / runs[0].ar_s) for step in runs[0].steps[1:]]
    return Estimate.of(gamma, totals)


def compare_held_out(setting: str, predicted: Estimate, runs: Sequence[DecodedRun]) -> HeldOut | None:
    """Compare a predicted speed-up with that of other runs; None without runs."""
    if not runs:
        return None
    return HeldOut(setting, len(runs), predicted.speedup, measured_speed(predicted.gamma, runs))


def prediction_of_runs(recipe: Recipe, runs: Sequence[DecodedRun], pass_costs: Mapping[int, float]) -> Preflight:
    """Predict from runs of `recipe`, with the longest drafts for recipes with lengths; `pass_costs` is v at load."""
    if not runs:
        raise UserError("the target ends these texts at once: provide other prompts")
    metrics = [Metrics.of(run.steps) for run in runs]
    ar_s = statistics.fmean(run.ar_s for run in runs)
    if has_lengths(recipe):
        c, v, estimates = _estimated_lengths(recipe, runs, CostModel(pass_costs), ar_s)
    else:
        seconds = (sum(getattr(m, name) for m in metrics) for name in STAGES)
        drafted, steps = (sum(getattr(m, name) for m in metrics) for name in ("drafted", "decode_steps"))
        terms = CostTerms.of(*seconds, drafted=drafted, steps=steps, pass_s=ar_s)
        c, v, estimates = terms.c, {round(1 + terms.drafted): terms.v}, [measured_speed(recipe.gamma, runs)]
    tested = sum(m.tested for m in metrics)
    alpha = sum(sum(m.accepted_by_position) for m in metrics) / max(1, tested)
    tokens = max(m.tokens for m in metrics)
    return Preflight(recipe, alpha, c, {1: 1.0, **v}, tuple(estimates), 0, runs[-1].kv_bytes, tokens=tokens)


def _estimated_lengths(
    recipe: Recipe, runs: Sequence[DecodedRun], costs: CostModel, ar_s: float
) -> tuple[float, dict[int, float], list[Estimate]]:
    """Return c, v and the estimates of all draft lengths."""
    rule, longest = RULES[recipe.rule], max(MAX_GAMMA, recipe.gamma)
    counted = not (rule.overlaps or rule.chains_only)
    texts = [recorded_steps(run.steps, counted=counted) for run in runs]
    plain_s = statistics.fmean(step.seconds.verify for run in runs for step in run.ar_steps)
    cost = measured_costs([step for text in texts for step in text], costs.verify, plain_s)
    expected = [acceptance_along_text(draft_chances(text, longest)) for text in texts]
    openings = [
        sum(step.seconds.draft for step in run.steps[1:]) - sum(step.draft_s for step in text)
        for run, text in zip(runs, texts, strict=True)
    ]

    def totals(gamma: int) -> list[Totals]:
        steps = [of_text(gamma) for of_text in expected]
        if len(steps) == 1:
            steps = _blocks(steps[0])
        opening = sum(openings) / len(steps)
        return [(part.tokens, part.count, (opening + part.cost(cost)) / ar_s) for part in steps]

    estimates = [Estimate.of(gamma, totals(gamma)) for gamma in range(1, longest + 1)]
    return cost.token / ar_s, {rows: cost.verify(rows) / ar_s for rows in range(2, longest + 2)}, estimates


def _blocks(text: ExpectedSteps) -> list[ExpectedSteps]:
    """Divide a single text into blocks of adjacent tokens."""
    length = max(1, min(BLOCK_TOKENS, len(text.steps) // 4))
    parts = [text.steps[i : i + length] for i in range(0, len(text.steps), length)]
    return [ExpectedSteps(len(part), part) for part in parts]


def _names(prompts: Sequence[Prompt]) -> str:
    return ", ".join(dict.fromkeys(prompt.kind for prompt in prompts))


def _settings(recipe: Recipe) -> str:
    limits = SamplingParams.of(recipe).truncation if recipe.temperature else {}
    values = {"temperature": recipe.temperature, **limits}
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in values.items())
