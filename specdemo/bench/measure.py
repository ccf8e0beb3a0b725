"""Run every lane on every prompt and keep what each run took.

Every prompt is decoded by every lane, in a shuffled order, right after one another, so that whatever else the machine
does weighs on all alike. Models are loaded and have run once before anything is timed. It can be left after any step;
the time that its caller takes between two steps is in no figure but `paused_s`.
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
from specdemo.core.step import Step
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

COPIED = 256 << 20  # bytes: more than any cache holds


@dataclass(frozen=True)
class BenchProgress:
    """A run that is under way: the `number`th of `total`, or 0 while everything runs once to warm up."""

    number: int
    total: int
    doing: str

    def __str__(self) -> str:
        return f"{self.number} of {self.total}: {self.doing}" if self.number else f"warming up: {self.doing}"


def recipe_label(recipe: Recipe) -> str:
    """A recipe in a few words."""
    length = f" gamma={recipe.gamma}" if recipe.policy == "fixed" else f" {recipe.policy}"
    rule = "" if recipe.rule == "rejection" else f" {recipe.rule}"
    where = f" {recipe.cloud.mode}" if recipe.cloud else ""
    return f"{recipe.method}{'' if recipe.method == 'ar' else length}{rule}{where} T={recipe.temperature:g}"


def grid(
    methods: Sequence[str], gammas: Sequence[int], policies: Sequence[str], temperatures: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """The settings that vary from recipe to recipe: at each temperature plain decoding, then every combination.

    Policies other than `fixed` begin with the last of `gammas`. Nothing is cut from the law, so that alpha is
    comparable with the papers'.
    """
    for temperature in temperatures:
        whole = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
        yield {"method": "ar", **whole}
        for method in methods:
            for policy in policies if method != "ar" else ():
                for gamma in gammas if policy == "fixed" else gammas[-1:]:
                    yield {"method": method, "policy": policy, "gamma": gamma, **whole}


def measure(
    recipes: Sequence[Recipe],
    prompts: Sequence[Prompt],
    pool: ModelPool,
    peers: Sequence[str] = (),
    seed: int = 0,
    repeat: int = 1,
) -> Iterator[BenchProgress | dict[str, Any]]:
    """Run everything. A `BenchProgress` when a run begins and after each of its steps, and a record per prompt when all are in.

    A record: the prompt's name, its class, and what each run took, in the order of `recipes`. `peers` are run with the
    settings of every plain recipe, after the recipes in each record's `runs`: all peers of the first plain recipe, then
    all of the second. With `repeat` above 1 all prompts come again, with the next seed. Raises `RuntimeError` where a
    run fails, since nothing can then be compared.
    """
    plain = [recipe for recipe in recipes if recipe.method == "ar"]
    drafting = next((recipe for recipe in recipes if recipe.drafter_spec), None)
    lanes: list[tuple[Recipe, str | None]] = [(recipe, None) for recipe in recipes]
    lanes += [(recipe, peer) for recipe in plain for peer in peers]
    theirs = None
    if peers:
        theirs = Baselines(plain[0].target_spec, drafting.drafter_spec if drafting else None)
    order = list(range(len(lanes)))
    total = len(lanes) * len(prompts) * repeat

    def run(
        lane: tuple[Recipe, str | None], prompt: Prompt, number: int, again: int = 0
    ) -> Generator[BenchProgress, None, dict[str, Any]]:
        recipe, peer = replace(lane[0], seed=lane[0].seed + again), lane[1]
        name = recipe_label(recipe) if peer is None else f"transformers {peer} T={recipe.temperature:g}"
        turn = BenchProgress(number, total, f"{prompt.name}, {name}" if number else name)
        yield turn
        if peer is None:
            return (yield from _ours(recipe, prompt.text, pool, turn))
        assert theirs is not None
        gamma = drafting.gamma if drafting else recipe.gamma
        return theirs.run(BASELINES[peer], prompt.text, recipe.temperature, gamma, recipe.max_tokens, recipe.seed)

    for recipe, peer in lanes:
        yield from run((replace(recipe, max_tokens=8), peer), prompts[0], 0)
    rng = random.Random(seed)
    numbers = count(1)
    for again, prompt in product(range(repeat), prompts):
        rng.shuffle(order)
        runs: list[Any] = [None] * len(lanes)
        for i in order:
            runs[i] = yield from run(lanes[i], prompt, next(numbers), again)
        yield {"kind": prompt.kind, "name": prompt.name, "runs": runs}


def _ours(
    recipe: Recipe, text: str, pool: ModelPool, turn: BenchProgress
) -> Generator[BenchProgress, None, dict[str, Any]]:
    """A run's metrics, with its tokens, the seconds on the wall after the first one, and what it moved and held."""
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
    """Bytes per second that this machine reads and writes when it copies a tensor: the best of a few."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        target[-1].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * COPIED / best
