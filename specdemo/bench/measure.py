"""Run every recipe on every prompt and record figures.

All lanes decode a prompt in shuffled order before the next one. The caller's time between steps is `paused_s`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, product
from typing import Any

import torch

from specdemo.bench.baselines import BASELINES, Baselines
from specdemo.core.events import End, Header, Loading, MemoryUse, StepEvent
from specdemo.core.rules import DEFAULT_RULE
from specdemo.core.step import Step
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

_COPY_BYTES = 256 << 20  # larger than any CPU cache


@dataclass(frozen=True)
class BenchProgress:
    """Benchmark progress: run `number` of `total` (0 during warm-up)."""

    number: int
    total: int
    doing: str

    def __str__(self) -> str:
        return f"{self.number} of {self.total}: {self.doing}" if self.number else f"warming up: {self.doing}"


def recipe_label(recipe: Recipe) -> str:
    length = f" gamma={recipe.gamma}" if recipe.policy == "fixed" else f" {recipe.policy}"
    rule = "" if recipe.rule == DEFAULT_RULE else f" {recipe.rule}"
    mode = f" {recipe.cloud.mode}" if recipe.cloud else ""
    return f"{recipe.method}{'' if recipe.method == 'ar' else length}{rule}{mode} T={recipe.temperature:g}"


def grid(
    methods: Sequence[str], gammas: Sequence[int], policies: Sequence[str], temperatures: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Yield recipe settings: for each temperature AR decoding, then every combination.

    Policies other than `fixed` start from the last of `gammas`. Top-p and top-k are off, as in the papers.
    """
    for temperature in temperatures:
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
        yield {"method": "ar", **sampling}
        for method in methods:
            for policy in policies if method != "ar" else ():
                for gamma in gammas if policy == "fixed" else gammas[-1:]:
                    yield {"method": method, "policy": policy, "gamma": gamma, **sampling}


def measure(
    recipes: Sequence[Recipe],
    prompts: Sequence[Prompt],
    pool: ModelPool,
    peers: Sequence[str] = (),
    seed: int = 0,
    repeat: int = 1,
) -> Iterator[BenchProgress | dict[str, Any]]:
    """Yield a `BenchProgress` per run and step, and a record per prompt.

    A record contains name and class of the prompt and the figures of each run: `recipes`, then the baselines `peers`
    for each AR recipe. `repeat` uses other seeds. Raises `RuntimeError` if a run fails.
    """
    ar = [recipe for recipe in recipes if recipe.method == "ar"]
    drafting = next((recipe for recipe in recipes if recipe.drafter_spec), None)
    lanes: list[tuple[Recipe, str | None]] = [(recipe, None) for recipe in recipes]
    lanes += [(recipe, peer) for recipe in ar for peer in peers]
    baselines = None
    if peers:
        baselines = Baselines(ar[0].target_spec, drafting.drafter_spec if drafting else None)
    order = list(range(len(lanes)))
    total = len(lanes) * len(prompts) * repeat

    def run(
        lane: tuple[Recipe, str | None], prompt: Prompt, number: int, repetition: int = 0
    ) -> Generator[BenchProgress, None, dict[str, Any]]:
        recipe, peer = replace(lane[0], seed=lane[0].seed + repetition), lane[1]
        name = recipe_label(recipe) if peer is None else f"transformers {peer} T={recipe.temperature:g}"
        turn = BenchProgress(number, total, f"{prompt.name}, {name}" if number else name)
        yield turn
        if peer is None:
            return (yield from _ours(recipe, prompt.text, pool, turn))
        assert baselines is not None
        gamma = drafting.gamma if drafting else recipe.gamma
        return baselines.run(BASELINES[peer], prompt.text, recipe.temperature, gamma, recipe.max_tokens, recipe.seed)

    for recipe, peer in lanes:
        yield from run((recipe, peer), prompts[0], 0)
    rng = random.Random(seed)
    numbers = count(1)
    for repetition, prompt in product(range(repeat), prompts):
        rng.shuffle(order)
        runs: list[Any] = [None] * len(lanes)
        for i in order:
            runs[i] = yield from run(lanes[i], prompt, next(numbers), repetition)
        yield {"kind": prompt.kind, "name": prompt.name, "runs": runs}


def _ours(
    recipe: Recipe, text: str, pool: ModelPool, turn: BenchProgress
) -> Generator[BenchProgress, None, dict[str, Any]]:
    """Return metrics, tokens, seconds after the first token, and bytes moved and held."""
    environment: Mapping[str, Any] = {}
    steps: list[Step] = []
    pauses: list[float] = []
    end = End("error")
    with closing(generate(recipe, text, pool)) as events:
        for event in events:
            match event:
                case Loading():
                    yield replace(turn, doing=event.text)
                case Header():
                    environment = event.environment
                case StepEvent():
                    steps.append(event.step)
                    since = time.perf_counter()
                    yield turn
                    pauses.append(time.perf_counter() - since)
                case End():
                    end = event
    if end.reason == "error":
        raise RuntimeError(f"{recipe_label(recipe)} failed: {end.error}")
    metrics, peak = end.metrics, end.peak or MemoryUse()
    weights = [environment["target_bytes"], environment["drafter_bytes"] or 0]
    paused = sum(pauses[:-1])
    return {
        **metrics.as_dict(),
        "peak_rss_bytes": peak.process,
        "peak_device_bytes": peak.device,
        "kv_bytes": peak.kv,
        "text": [token for step in steps for token in step.tokens],
        "decode_tokens": metrics.decode_tokens,
        "wall_s": steps[-1].t - steps[0].t - paused,
        "paused_s": paused,
        "bytes_read": weights[0] * metrics.decode_steps + weights[1] * metrics.drafted,
        "held_bytes": peak.device or sum(weights) + (peak.kv or 0),
        "environment": environment,
    }


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second read and written by a tensor copy (best of five)."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        target[-1].item()  # synchronise the device
        best = min(best, time.perf_counter() - start)
    return 2 * _COPY_BYTES / best
