"""Comparison of edge only, cloud only and both on the same prompts.

Peak memory is omitted, since the modes share one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdemo.core.errors import UserError
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import MODES
from specdemo.ui.labels import NOTHING, number, percent
from specdemo.ui.settings import recipe_of
from specdemo.ui.sweep import Sweep

MODE_TABLE_HEAD = (
    "mode", "TTFT p50 / p95 ms", "total p50 / p95 s", "tokens/s", "speed-up", "KV MB", "up kB", "down kB",
    "cloud calls", "exact",
)  # fmt: skip
MOST_PROMPTS = 12


def three(settings: Mapping[str, Any], device: str, count: Any, max_tokens: Any) -> Sweep:
    """Return a recipe per mode, with the first code prompts. Raises `UserError` for invalid settings."""
    if isinstance(count, bool) or not isinstance(count, (int, float)) or not 1 <= count <= MOST_PROMPTS:
        raise UserError(f"prompts must be from 1 to {MOST_PROMPTS}, not {count!r}")
    common = {**settings, "max_tokens": max_tokens, "chat": False}
    alone = {"provisional": False, "gates": []}  # without drafts over the link these options do not apply
    varied = [{**common, "mode": mode, **({} if mode == "speculative" else alone)} for mode in MODES]
    prompts: list[Prompt] = load_prompts(kinds=["code"])[: int(count)]
    return Sweep(tuple(recipe_of(values, device) for values in varied), tuple(prompts))


def rows(recipes: Sequence[Recipe], records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row per mode, by `MODE_TABLE_HEAD`. The speed-up compares median total times with cloud only."""
    runs = {recipe.cloud.mode: [record["runs"][i] for record in records] for i, recipe in enumerate(recipes)}
    totals = {mode: [run["ttft_s"] + run["wall_s"] for run in mode_runs] for mode, mode_runs in runs.items()}
    exact = {recipe.cloud.mode: recipe.exact for recipe in recipes}
    base = _quantile(totals["cloud_only"], 0.5) if "cloud_only" in totals else None
    return [_row(mode, mode_runs, totals[mode], base, exact[mode]) for mode, mode_runs in runs.items()]


def _row(
    mode: str, runs: Sequence[Mapping[str, Any]], totals: Sequence[float], base: float | None, exact: bool
) -> list[str]:
    ttfts = [run["ttft_s"] for run in runs]
    links = [run.get("remote", {}) for run in runs]
    tokens, steps = (sum(run[name] for run in runs) for name in ("tokens", "steps"))
    calls = sum(link.get("escalated", 0.0) for link in links)
    return [
        mode,
        f"{1000 * _quantile(ttfts, 0.5):.0f} / {1000 * _quantile(ttfts, 0.95):.0f}",
        f"{_quantile(totals, 0.5):.2f} / {_quantile(totals, 0.95):.2f}",
        number(tokens / sum(totals), 1),
        NOTHING if base is None else f"{base / _quantile(totals, 0.5):.2f}×",
        f"{max(run['kv_bytes'] for run in runs) / 1e6:.2f}",
        *(f"{sum(link.get(name, 0.0) for link in links) / 1e3:,.1f}" for name in ("bytes_up", "bytes_down")),
        percent(calls / steps),
        "yes" if exact else "lossy",
    ]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
