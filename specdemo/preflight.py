"""Estimate the speed-up of a recipe from texts of the target, before a run.

Chains are replayed: if the text continues with x, a draft was accepted with probability min(1, q(x) / p(x))
(2211.17192, section 2.2), a point mass if it equals x. Forests, heads and re-encoded drafts are decoded.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdemo.core.decode import DraftBudget, Drafter, decode
from specdemo.core.errors import UserError
from specdemo.core.estimate import (
    ExpectedSteps,
    StepCost,
    acceptance_along_text,
    acceptance_by_position,
    rates_at_risk,
)
from specdemo.core.metrics import Metrics, ratio_interval
from specdemo.core.policies import Fixed
from specdemo.core.rules import RULES
from specdemo.core.sampling import SamplingParams, fitted
from specdemo.core.step import Draft, Step, Verdict
from specdemo.core.theory import STAGES, CostTerms
from specdemo.drafters import METHODS
from specdemo.drafters.method import Method
from specdemo.models.chat_prompt import read_prompt
from specdemo.models.heads import LoadedDrafter
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import check_ids
from specdemo.models.zoo import PAIRS
from specdemo.pipeline import Pipeline, build_pipeline, draft_sampling_params, sampling_params
from specdemo.plan import plan_run
from specdemo.prompts import RECORDED_TEMPERATURES, Prompt, alternate_classes, load_prompts, load_written
from specdemo.recipe import Recipe
from specdemo.worker import yield_device

MAX_GAMMA = 8
MAX_TEXT_TOKENS = 512
SAMPLED_TEXTS = 12
MIN_SAMPLED_TEXTS = 4
GENERATION_S = 12.0
WORTHWHILE_SPEEDUP = 1.03
EXPENSIVE_DRAFT = 0.3  # value of c
BASELINE_RUNS = 5  # consecutive AR steps
BASELINE_STEPS = 20  # AR steps of all texts, at least
SHORT_TEXT_TOKENS = 48  # sampled from a visitor's own prompt
OWN = "this prompt"  # class of a visitor's own prompt
BLOCK_TOKENS = 8  # unit of the interval if there is a single text; shorter in texts of fewer than four units
WARMUP_RUNS = 2  # the first of these, not counted
HELD_OUT_TEXTS, HELD_OUT_S = 6, 6.0  # limits of the measurement
HELD_OUT_AR_STEPS = 24  # after each text

TimedText = tuple[Sequence[int], int]  # tokens and length of the prompt
Totals = tuple[float, float, float]  # tokens, steps, cost in AR steps
Chances = list[list[float]]  # acceptance probabilities of the draft at each position


@dataclass(frozen=True)
class StepCosts:
    """Measured costs of steps, in AR steps."""

    ar_s: float  # seconds of an AR step
    c: float  # of a draft token, on average
    empty: float  # of a drafter without a proposal
    first: float  # of the tokens read before a draft
    token: float  # of a further draft token
    v: dict[int, float]  # of a pass by number of rows

    def of_steps(self, longest: int) -> StepCost:
        """Return the cost of steps with up to `longest` draft tokens."""
        v = fit_costs(self.v, longest + 1)
        return StepCost(lambda rows: v[int(rows)], self.token, self.first, plain=1 + self.empty)


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
        """Combine the totals of each text, or of each block of a single text."""
        tokens, steps, cost = map(sum, zip(*texts, strict=True))
        interval = ratio_interval([(text[0], text[2]) for text in texts])
        return cls(gamma, tokens / steps, tokens / cost, *interval)


@dataclass(frozen=True)
class HeldOut:
    """Speed-up of prompts that the prediction did not use, for a draft length whose steps it did not time."""

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
    alpha: float  # acceptance per tested token; replayed: at the first draft position
    c: float  # cost of a draft token, in AR passes
    v: dict[int, float]  # cost of a pass by number of rows, in AR passes
    estimates: tuple[Estimate, ...]  # an estimate per gamma, or one for decoded methods
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


def preflight(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Preflight:
    """Estimate `recipe`, chains for gamma 1 to `MAX_GAMMA`. Raises `UserError` if unsupported."""
    *_, result = predict(recipe, prompts, pool)
    assert isinstance(result, Preflight)
    return result


def predict(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[PreflightProgress | Preflight]:
    """Yield the progress of `preflight`, then its result."""
    if METHODS[recipe.method].preflight is None:
        names = ", ".join(name for name, method in METHODS.items() if method.preflight)
        raise UserError(f"preflight supports the methods {names}, not {recipe.method}: run or bench it")
    yield PreflightProgress(0.0, "loading the models")
    target, drafter, pipeline = load_comparable(recipe, pool)
    known, others = halves(prompts)
    with pipeline:
        replayed = is_replayed(recipe) and pipeline.bridge is None
        for event in (_replayed if replayed else _decoded_texts)(recipe, known, target, drafter, pipeline):
            if not isinstance(event, Preflight):
                yield event
                continue
            yield PreflightProgress(0.9, f"measuring other prompts ({_names(others)})")
            gamma = held_out_gamma(recipe, replayed)
            predicted = next((row for row in event.estimates if row.gamma == gamma), event.best)
            drafting = fixed_length(recipe, predicted.gamma) if len(event.estimates) > 1 else recipe
            runs = held_out_runs(drafting, target, drafter, others, pipeline.shared_context)
            held_out = compare_held_out(event.label(predicted), predicted.speedup, predicted.gamma, runs)
            yield replace(event, held_out=held_out)


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Split the prompts of each class; of single prompts only the draft length is held out."""
    kinds = {prompt.kind: [other for other in prompts if other.kind == prompt.kind] for prompt in prompts}
    known = [prompt for group in kinds.values() for prompt in group[::2]]
    return known, [prompt for group in kinds.values() for prompt in group[1::2]] or known


def held_out_gamma(recipe: Recipe, replayed: bool) -> int:
    """Return the recipe's draft length within the estimated lengths, or the next shorter if that length is decoded."""
    return min(max(1, recipe.gamma), MAX_GAMMA) if replayed else max(1, recipe.gamma - 1)


def fixed_length(recipe: Recipe, gamma: int) -> Recipe:
    return replace(recipe, gamma=gamma, policy="fixed", gamma_min=None, gamma_max=None)


def held_out_runs(
    recipe: Recipe, target: LoadedModel, drafter: LoadedDrafter | None, prompts: Sequence[Prompt], context: int
) -> list[DecodedRun]:
    runs = decoded_runs(recipe, target, drafter, prompts, context, HELD_OUT_TEXTS, HELD_OUT_S, HELD_OUT_AR_STEPS)
    return [run for run in runs if len(run.steps) > 1 and run.ar_steps_s]


def compare_held_out(setting: str, predicted: float, gamma: int, runs: Sequence[DecodedRun]) -> HeldOut | None:
    """Compare a predicted speed-up with total times of runs and of the AR steps after each; None without runs."""
    totals: list[Totals] = []
    for run in runs:
        ar_s, metrics = statistics.fmean(run.ar_steps_s), Metrics.of(run.steps)
        totals.append((metrics.decode_tokens, metrics.decode_steps, metrics.decode_s / ar_s))
    if len(runs) == 1:
        totals = [(len(step.tokens), 1, sum(step.seconds) / ar_s) for step in runs[0].steps[1:]]
    return HeldOut(setting, len(runs), predicted, Estimate.of(gamma, totals)) if totals else None


def _decoded_texts(
    recipe: Recipe, prompts: Sequence[Prompt], target: LoadedModel, drafter: LoadedDrafter | None, pipeline: Pipeline
) -> Iterator[PreflightProgress | Preflight]:
    weights = target.weight_bytes + (drafter.weight_bytes if drafter else 0)
    runs: list[DecodedRun] = []
    yield PreflightProgress(0.1, f"decoding {_names(prompts)}")
    for run in decoded_runs(recipe, target, drafter, prompts, pipeline.shared_context):
        runs.append(run)
        yield PreflightProgress(0.1 + 0.8 * len(runs) / max(len(runs), len(prompts)), f"decoding {_names(prompts)}")
    origin = f"{len(runs)} decoded with {recipe.method}, {_settings(recipe)} ({_names(prompts)})"
    result = _of_runs(recipe, runs, weights, origin)
    shorter: list[Estimate] = []
    if drafts_all(recipe):
        timed = partial(build_pipeline, plan_run(recipe), target, drafter)
        texts = [text_of_run(run) for run in runs if len(run.steps) > 1]
        costs = measure_costs(timed, texts, recipe.gamma, without=held_out_gamma(recipe, False))
        shorter = shorter_drafts(recipe, runs, costs, prompt_cost(pipeline, texts[0], costs))
    yield replace(result, estimates=(*shorter, *result.estimates))


def _replayed(
    recipe: Recipe, prompts: Sequence[Prompt], target: LoadedModel, drafter: LoadedDrafter | None, pipeline: Pipeline
) -> Iterator[PreflightProgress | Preflight]:
    weights = target.weight_bytes + (drafter.weight_bytes if drafter else 0)
    yield PreflightProgress(0.1, f"reading texts ({_names(prompts)})")
    texts, origin = usable_texts(recipe, target, prompts, pipeline.shared_context)
    yield PreflightProgress(0.4, f"timing passes over 1 to {MAX_GAMMA + 1} tokens")
    timed = partial(build_pipeline, plan_run(recipe), target, drafter)
    costs = measure_costs(timed, texts, MAX_GAMMA, without=held_out_gamma(recipe, True))
    v = fit_costs(costs.v, MAX_GAMMA + 1)
    replayed: list[tuple[Chances, float]] = []  # chances of a text and the cost of its prompt
    for i, (tokens, start) in enumerate(texts):
        yield PreflightProgress(0.7 + 0.2 * i / len(texts), "replaying the drafts")
        yield_device()
        with build_pipeline(plan_run(recipe), target, drafter) as empty:
            opening = prompt_cost(empty, (tokens, start), costs)
        replayed.append((replay(recipe, target, drafter, (tokens, start)), opening))
    first = [draft[0] for chances, _ in replayed for draft in chances if draft]

    step_cost = costs.of_steps(MAX_GAMMA)

    def totals(gamma: int) -> list[Totals]:
        expected = [(acceptance_along_text(chances)(gamma), opening) for chances, opening in replayed]
        if len(expected) == 1:
            return _blocks(expected[0][0], step_cost, expected[0][1])
        return [_totals(text, step_cost, opening) for text, opening in expected]

    estimates = tuple(Estimate.of(gamma, totals(gamma)) for gamma in range(1, MAX_GAMMA + 1))
    tokens, _ = texts[0]
    pipeline.verifier.verify(tokens, Draft())  # fill the KV cache
    kv_bytes = round(1000 * pipeline.position_bytes)
    alpha = statistics.mean(first) if first else 0.0
    read = max(len(tokens) - start for tokens, start in texts)
    yield Preflight(recipe, alpha, costs.c, v, estimates, weights, kv_bytes, f"{origin} ({_names(prompts)})", read)


def _names(prompts: Sequence[Prompt]) -> str:
    return ", ".join(dict.fromkeys(prompt.kind for prompt in prompts))


def fit_costs(v: Mapping[int, float], longest: int) -> dict[int, float]:
    """Fit a line to the costs of passes over 2 to `longest` rows, since single measurements are noisy; `v[1]` is 1."""
    rows = [count for count in v if count > 1] if len(v) > 2 else [*v]
    slope = max(0.0, statistics.linear_regression(rows, [v[count] for count in rows]).slope)
    offset = statistics.mean(v[count] for count in rows) - slope * statistics.mean(rows)
    return {1: v[1], **{count: max(v[1], offset + slope * count) for count in range(2, longest + 1)}}


def is_replayed(recipe: Recipe) -> bool:
    method = METHODS[recipe.method]
    sampled = method.sampled and recipe.temperature > 0
    comparable = method.preflight != "decoding" and recipe.head_name is None
    return comparable and (RULES[recipe.rule].overlaps or (plan_run(recipe).exact and not sampled))


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


def texts_for(recipe: Recipe, kinds: Sequence[str] = ()) -> list[Prompt]:
    """Return prompts, with continuations if recorded."""
    if recipe.models[0] != PAIRS["bundled"].target:
        return load_prompts(kinds, recipe.chat)
    prompts = load_written(recipe.temperature, kinds)
    changed = recipe.repetition_penalty != 1 or recipe.bad_words or recipe.chat
    truncated = recipe.temperature > 0 and SamplingParams.of(recipe).truncation
    if changed or truncated or recipe.temperature not in RECORDED_TEMPERATURES:
        return [replace(prompt, written="") for prompt in prompts]
    return prompts


def usable_texts(
    recipe: Recipe,
    target: LoadedModel,
    prompts: Sequence[Prompt],
    context: int,
    most: int = SAMPLED_TEXTS,
    seconds: float = GENERATION_S,
) -> tuple[list[TimedText], str]:
    """Return encoded texts and their origin; sample missing continuations."""
    length = min(recipe.max_tokens, MAX_TEXT_TOKENS)
    recorded = [_recorded_text(target, prompt, length) for prompt in prompts if prompt.written]
    ar, others = replace(recipe, method="ar", cloud=None), [prompt for prompt in prompts if not prompt.written]
    sampled = [text_of_run(run) for run in decoded_runs(ar, target, None, others, context, most, seconds)]
    counts = {f"recorded, {_settings(recipe)}": len(recorded), f"sampled, {_settings(recipe)}": len(sampled)}
    texts = [(tokens[: context - MAX_GAMMA], start) for tokens, start in [*recorded, *sampled]]
    texts = [(tokens, start) for tokens, start in texts if len(tokens) > start + 1]
    if not texts:
        raise UserError("the target ends these texts at once: provide other prompts")
    return texts, " and ".join(f"{count} {words}" for words, count in counts.items() if count)


def _settings(recipe: Recipe) -> str:
    limits = SamplingParams.of(recipe).truncation if recipe.temperature else {}
    values = {"temperature": recipe.temperature, **limits}
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in values.items())


def _recorded_text(target: LoadedModel, prompt: Prompt, length: int) -> TimedText:
    tokens = target.tokenizer.encode(prompt.text)
    written = target.tokenizer.encode(prompt.written, add_special_tokens=False)
    return check_ids(tokens + written[:length], target.vocab_size), len(tokens)


@dataclass(frozen=True)
class DecodedRun:
    """Decoded text with the seconds of AR steps after it."""

    prompt: Sequence[int]
    steps: list[Step]
    ar_steps_s: list[float]
    kv_bytes: int

    @property
    def ar_s(self) -> float:
        return statistics.median(self.ar_steps_s) if self.ar_steps_s else 0.0


def decoded_runs(
    recipe: Recipe,
    target: LoadedModel,
    drafter: LoadedDrafter | None,
    prompts: Sequence[Prompt],
    context: int,
    most: int = SAMPLED_TEXTS,
    seconds: float = GENERATION_S,
    ar_steps: int = BASELINE_RUNS,
) -> Iterator[DecodedRun]:
    """Decode up to `most` prompts of alternating classes, fewer after `seconds`, each with at least `ar_steps`."""
    ar, began = replace(recipe, method="ar", cloud=None), time.perf_counter()
    baseline_steps = max(ar_steps, BASELINE_STEPS // max(1, len(prompts)))
    for seed, prompt in enumerate(alternate_classes(prompts)[:most]):
        if seed >= MIN_SAMPLED_TEXTS and time.perf_counter() - began > seconds:
            return
        inputs = (prompt.text, recipe.chat, target.vocab_size, recipe.template_options)
        tokens = read_prompt(target.tokenizer, *inputs).tokens
        tokens = tokens[: min(MAX_TEXT_TOKENS, context - 2 * MAX_GAMMA)]
        most_tokens = min(recipe.max_tokens, MAX_TEXT_TOKENS, context - len(tokens) - MAX_GAMMA)
        with build_pipeline(plan_run(replace(recipe, seed=seed)), target, drafter) as pipeline:
            steps = _decoded(pipeline, tokens, most_tokens)
            kv_bytes = round(1000 * pipeline.position_bytes)
        plain = steps
        if recipe.method != "ar":
            with build_pipeline(plan_run(ar), target, None) as baseline:
                plain = _decoded(baseline, tokens, 1 + WARMUP_RUNS + baseline_steps)
        ar_s = [step.seconds.verify + step.seconds.host for step in plain[1 + WARMUP_RUNS :]]
        yield DecodedRun(tokens, steps, ar_s, kv_bytes)


def _decoded(pipeline: Pipeline, tokens: Sequence[int], count: int) -> list[Step]:
    roles = pipeline.verifier, pipeline.drafter, pipeline.policy
    steps = []
    for step in decode(tokens, *roles, max_tokens=count, stop=pipeline.stop, clock=time.perf_counter):
        steps.append(step)
        yield_device()
    return steps


def _of_runs(recipe: Recipe, runs: Sequence[DecodedRun], weight_bytes: int, origin: str) -> Preflight:
    known = [run.ar_s for run in runs if run.ar_s]
    metrics = [Metrics.of(run.steps) for run in runs if len(run.steps) > 1]
    if not known or not metrics:
        raise UserError("the target ends these texts at once: provide other prompts")
    ar_s = statistics.median(known)
    totals = [(m.decode_tokens, m.decode_steps, m.decode_s / ar_s) for m in metrics]
    if len(metrics) == 1:
        totals = [(len(s.tokens), 1, sum(s.seconds) / ar_s) for s in runs[0].steps[1:]]
    seconds = (sum(getattr(m, name) for m in metrics) for name in STAGES)
    drafted, tested, steps = (sum(getattr(m, name) for m in metrics) for name in ("drafted", "tested", "decode_steps"))
    terms = CostTerms.of(*seconds, drafted=drafted, steps=steps, pass_s=ar_s)
    alpha = sum(sum(m.accepted_by_position) for m in metrics) / max(1, tested)
    v, estimate = {1: 1.0, round(1 + terms.drafted): terms.v}, Estimate.of(recipe.gamma, totals)
    read = max(m.tokens for m in metrics)
    return Preflight(recipe, alpha, terms.c, v, (estimate,), weight_bytes, runs[-1].kv_bytes, origin, read)


def shorter_drafts(recipe: Recipe, runs: Sequence[DecodedRun], costs: StepCosts, opening: float) -> list[Estimate]:
    """Estimate drafts that are shorter than the recipe's, with `opening` AR steps for the prompt of the drafter."""
    step_cost = costs.of_steps(recipe.gamma)
    estimates = []
    for gamma in range(1, recipe.gamma):
        totals: list[Totals] = []
        for m in (Metrics.of(run.steps) for run in runs if len(run.steps) > 1):
            acceptance = acceptance_by_position(
                rates_at_risk(m.accepted_by_position, m.tested_by_position, recipe.gamma)
            )
            steps = m.decode_tokens / acceptance(gamma).tokens
            totals.append((m.decode_tokens, steps, opening + steps * step_cost(gamma)))
        estimates.append(Estimate.of(gamma, totals))
    return estimates


def drafts_all(recipe: Recipe) -> bool:
    """Return True for models and heads that draft as many tokens as they may, in a chain."""
    method = METHODS[recipe.method]
    chain = method.shape == "chain" and method.drafter is not None and not method.optional_model
    return chain and recipe.policy == "fixed" and recipe.gamma > 1


def text_of_run(run: DecodedRun) -> TimedText:
    return [*run.prompt, *(token for step in run.steps for token in step.tokens)], len(run.prompt)


def distributions(cached: CachedModel, tokens: Sequence[int], sampling: SamplingParams, vocab_size: int) -> Tensor:
    """Return the next-token probabilities after each token, `[n, vocab_size]`."""
    paths = [tokens[: i + 1] for i in range(len(tokens))] if sampling.needs_paths else ()
    return sampling(fitted(cached.read(tokens), vocab_size), paths)


def replay(recipe: Recipe, target: LoadedModel, drafter: LoadedDrafter | None, text: TimedText) -> Chances:
    """Return acceptance probabilities after the first token of the continuation."""
    (tokens, start), method = text, METHODS[recipe.method]
    sampling = sampling_params(recipe, target)
    chances: Chances = []
    with build_pipeline(plan_run(recipe), target, drafter) as pipeline:
        cached, candidates = _local(pipeline.target_cache), method.candidates(recipe)
        p = distributions(cached, tokens, sampling, cached.vocab_size)
        count = min(candidates, cached.vocab_size)
        choices = cached.read(tokens).topk(count).indices.tolist() if count > 1 else []
        of_model: list[float] = []
        if pipeline.draft_caches:
            own = draft_sampling_params(recipe, sampling)
            q = distributions(pipeline.draft_caches[0], tokens, own, cached.vocab_size)
            of_model = acceptance_of_text(p, q, tokens)
        for i in range(start, len(tokens)):
            if i > start:
                chances.append(_draft_chances(method, pipeline.drafter, tokens, i, of_model))
            if choices:
                verdict = Verdict((), tokens[i], choices=(tuple(choices[i - 1]),))
                pipeline.drafter.observe(Step(i - start, (tokens[i],), Draft(), verdict, 0, 0.0, 0.0, 0.0, 0.0))
    return chances


def acceptance_of_text(p: Tensor, q: Tensor, tokens: Sequence[int]) -> list[float]:
    """Acceptance probability of a draft of each token after the first, given the text; `p`, `q` `[n, vocab]`.

    It is sum min(p, q) where p is 0 (text encoded again).
    """
    x = torch.tensor(tokens[1:], device=p.device)[:, None]
    px, qx = p[:-1].gather(1, x)[:, 0], q[:-1].gather(1, x)[:, 0]
    overlap = torch.minimum(p[:-1], q[:-1]).sum(-1)
    return torch.where(px > 0, (qx / px).clamp(max=1), overlap).tolist()


def _local(cache: CachedModel | None) -> CachedModel:
    assert cache is not None
    return cache


def _draft_chances(
    method: Method, drafter: Drafter, tokens: Sequence[int], i: int, of_model: Sequence[float]
) -> list[float]:
    stored = method.replayed(drafter, tokens[:i]) if method.preflight == "replay" else None
    if stored is None:
        return list(of_model[i - 1 : i - 1 + MAX_GAMMA])
    draft = stored.propose(tokens[:i], DraftBudget(MAX_GAMMA, Fixed(MAX_GAMMA)))
    hits = len(draft.follow(tokens[i:]))
    return [1.0] * hits + [0.0] * (len(draft) - hits)


def _blocks(text: ExpectedSteps, cost: StepCost, opening: float) -> list[Totals]:
    """Return the totals of adjacent tokens of a single text, with the cost of its prompt in equal shares."""
    length = max(1, min(BLOCK_TOKENS, len(text.steps) // 4))
    parts = [text.steps[i : i + length] for i in range(0, len(text.steps), length)]
    blocks = [ExpectedSteps(len(part), part) for part in parts]
    return [_totals(block, cost, opening / len(blocks)) for block in blocks]


def _totals(text: ExpectedSteps, cost: StepCost, opening: float) -> Totals:
    return text.tokens, text.count, opening + text.cost(cost)


def measure_costs(
    pipeline: Callable[[], Pipeline],
    texts: Sequence[TimedText],
    longest: int,
    repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
    *,
    without: int = 0,
) -> StepCosts:
    """Measure drafts of up to `longest` tokens, except `without`: medians over `repeats` steps of every length.

    A drafter without proposals has c = 0.
    """
    gammas = [gamma for gamma in range(1, longest + 1) if gamma != without]
    verify_s: dict[int, list[float]] = {gamma: [] for gamma in (0, *gammas)}
    draft_s: dict[int, list[float]] = {}  # by number of drafted tokens
    lengths = cycle([*[0] * BASELINE_RUNS, *gammas])
    consecutive = 0
    for tokens, start in cycle(texts):
        with pipeline() as measured:
            for step in _timed_steps(measured, tokens, start, lengths, clock):
                consecutive = 0 if step.gamma else consecutive + 1
                if step.gamma or consecutive > WARMUP_RUNS:
                    verify_s[step.gamma].append(step.verify_s)
                if step.gamma:
                    draft_s.setdefault(step.drafted, []).append(step.draft_s)
                if len(verify_s[gammas[-1]]) == repeats:
                    return _median_costs(verify_s, draft_s)
    raise ValueError("there are no texts")


def _median_costs(verify_s: Mapping[int, Sequence[float]], draft_s: Mapping[int, Sequence[float]]) -> StepCosts:
    ar_s = statistics.median(verify_s[0])
    v = {1 + gamma: statistics.median(seconds) / ar_s for gamma, seconds in verify_s.items()}
    drafts = {count: statistics.median(seconds) / ar_s for count, seconds in sorted(draft_s.items())}
    empty = drafts.pop(0, 0.0)
    if not drafts:
        return StepCosts(ar_s, 0.0, empty, 0.0, 0.0, v)
    each = [seconds / count for count, of_count in draft_s.items() if count for seconds in of_count]
    c = statistics.median(each) / ar_s
    if len(drafts) == 1:
        return StepCosts(ar_s, c, empty, 0.0, c, v)
    slope, offset = statistics.linear_regression(list(drafts), list(drafts.values()))
    if slope < 0 or offset < 0:  # noise
        slope, offset = c, 0.0
    return StepCosts(ar_s, c, empty, offset, slope, v)


def prompt_cost(pipeline: Pipeline, text: TimedText, costs: StepCosts) -> float:
    """Return the drafter's cost of reading a prompt, in AR steps."""
    tokens, start = text
    pipeline.verifier.verify(tokens[:start], Draft())
    began = time.perf_counter()
    draft = pipeline.drafter.propose(tokens[:start], DraftBudget(1, Fixed(1)))
    return max(0.0, (time.perf_counter() - began) / costs.ar_s - costs.c * len(draft))


class TimedStep(NamedTuple):
    """Times of a step with a draft of `gamma` tokens, of which the drafter proposed `drafted`."""

    gamma: int
    drafted: int
    draft_s: float
    verify_s: float


def _timed_steps(
    pipeline: Pipeline, text: Sequence[int], start: int, lengths: Iterator[int], clock: Callable[[], float]
) -> Iterator[TimedStep]:
    pipeline.verifier.verify(text[:start], Draft())  # prefill
    position = start + 1
    while position < len(text):
        yield_device()
        gamma = next(lengths)
        began = clock()
        draft = pipeline.drafter.propose(text[:position], DraftBudget(gamma, Fixed(gamma))) if gamma else Draft()
        draft_s, drafted = clock() - began, len(draft)
        if drafted < gamma:  # keep the number of rows
            draft = Draft.chain(((text[position] + 1) % _local(pipeline.target_cache).vocab_size,) * gamma)
        began = clock()
        pipeline.verifier.verify(text[:position], draft)
        yield TimedStep(gamma, drafted, draft_s, clock() - began)
        position += 1 + len(draft.follow(text[position:]))
