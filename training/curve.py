"""Which drafter? Several shapes learn side by side from one target: how much each agrees against what each costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import LlamaForCausalLM

from benchmarks.pass_cost import step_seconds
from specdemo.core.theory import best_gamma, walltime_improvement
from specdemo.models.engines.llama_weights import LlamaWeights
from training.objectives import held_out_agreement

FILE = "curve.json"


@dataclass(frozen=True)
class Point:
    """One shape on the curve."""

    shape: str
    alpha: float  # mean sum min(p, q) on held-out text
    first: float  # how often the first choices agree
    c: float  # its pass in passes of the target
    gamma: int  # the best draft length for these
    speedup: float  # what Theorem 3.8 promises there


def measure(drafters: Mapping[str, LlamaForCausalLM], target: LlamaForCausalLM, held_out: np.ndarray) -> list[Point]:
    """Agreement on held-out text and cost in the program's own engine."""
    costs = step_seconds([LlamaWeights(model) for model in (target, *drafters.values())])
    points = []
    for (shape, drafter), cost in zip(drafters.items(), costs[1:], strict=True):
        alpha, first = held_out_agreement(drafter, target, held_out, 1024, 24)
        c = cost / costs[0]
        gamma = best_gamma(alpha, c)
        points.append(Point(shape, alpha, first, c, gamma, walltime_improvement(alpha, gamma, c)))
    return points


def write(points: list[Point], folder: Path) -> str:
    """Keep the curve beside the pair; its table."""
    (folder / FILE).write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n", "utf-8")
    return table(points)


def read(folder: Path) -> list[Point]:
    """The curve kept beside the pair; empty if there is none."""
    path = folder / FILE
    return [Point(**point) for point in json.loads(path.read_text("utf-8"))] if path.exists() else []


def table(points: list[Point]) -> str:
    """The curve as Markdown."""
    rows = [f"| {p.shape} | {p.alpha:.3f} | {p.first:.3f} | {p.c:.3f} | {p.gamma} | {p.speedup:.2f} |" for p in points]
    head = "| drafter | alpha | first choices agree | c | best gamma | Theorem 3.8 |\n|---|---|---|---|---|---|"
    return "\n".join([head, *rows])
