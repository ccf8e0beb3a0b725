"""Agreement and cost of several drafter shapes trained in parallel: table "Which drafter" of assets/pair/README.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import LlamaForCausalLM

from benchmarks.pass_cost import step_seconds
from specdemo.bench.table import markdown_table
from specdemo.core.theory import best_gamma, walltime_improvement
from specdemo.models.load import fuse
from training.objectives import held_out_agreement

CURVE_FILE = "curve.json"


@dataclass(frozen=True)
class CurvePoint:
    """Figures of a drafter shape."""

    shape: str
    alpha: float  # mean sum min(p, q) on test text
    first: float  # share of equal first choices
    c: float  # cost of its pass in target passes
    gamma: int  # best draft length
    speedup: float  # Theorem 3.8 for that length


def measure(
    drafters: Mapping[str, LlamaForCausalLM], target: LlamaForCausalLM, held_out: np.ndarray
) -> list[CurvePoint]:
    """Measure agreement on test text and cost in the engine of this program."""
    costs = step_seconds([fuse(model, consume=False)[0] for model in (target, *drafters.values())])
    points = []
    for (shape, drafter), cost in zip(drafters.items(), costs[1:], strict=True):
        alpha, first = held_out_agreement(drafter, target, held_out, 1024, 24)
        c = cost / costs[0]
        gamma = best_gamma(alpha, c)
        points.append(CurvePoint(shape, alpha, first, c, gamma, walltime_improvement(alpha, gamma, c)))
    return points


def write(points: list[CurvePoint], folder: Path) -> str:
    """Save the curve in `folder` and return its table."""
    (folder / CURVE_FILE).write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n", "utf-8")
    return table(points)


def read(folder: Path) -> list[CurvePoint]:
    """Load the curve saved in `folder`; empty if missing."""
    path = folder / CURVE_FILE
    return [CurvePoint(**point) for point in json.loads(path.read_text("utf-8"))] if path.exists() else []


def table(points: list[CurvePoint]) -> str:
    """Return the curve as a Markdown table."""
    head = ("drafter", "mean overlap", "first choices agree", "c", "best gamma", "Theorem 3.8")
    rows = [(p.shape, f"{p.alpha:.3f}", f"{p.first:.3f}", f"{p.c:.3f}", p.gamma, f"{p.speedup:.2f}") for p in points]
    return markdown_table(head, rows)
