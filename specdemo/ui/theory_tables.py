"""Markdown tables of the Theory tab, each with a row for the latest run.

Only published measurements are quoted; all other values are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdemo.bench.table import markdown_table
from specdemo.core.theory import (
    accepted_share,
    alpha_of_share,
    expected_tokens,
    operations,
    share_speedup,
    walltime_improvement,
)
from specdemo.ui.theory_curves import TheorySettings
from specdemo.ui.theory_point import TheoryPoint

# 2211.17192, Table 1: alpha and gamma at c = 0.
_LEVIATHAN_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))

# 2211.17192, Table 2 and appendix: T5-XXL (11B) on a TPU v4, batch size 1.
# Task, drafter, temperature, gamma, alpha, c, measured speed-up.
_LEVIATHAN_2 = (
    ("EnDe", "small", 0, 7, 0.75, 0.02, 3.4),
    ("EnDe", "base", 0, 7, 0.80, 0.04, 2.8),
    ("EnDe", "large", 0, 7, 0.82, 0.11, 1.7),
    ("EnDe", "small", 1, 7, 0.62, 0.02, 2.6),
    ("EnDe", "base", 1, 5, 0.68, 0.04, 2.4),
    ("EnDe", "large", 1, 3, 0.71, 0.11, 1.4),
    ("CNN/DM", "small", 0, 5, 0.65, 0.02, 3.1),
    ("CNN/DM", "base", 0, 5, 0.73, 0.04, 3.0),
    ("CNN/DM", "large", 0, 3, 0.74, 0.11, 2.2),
    ("CNN/DM", "small", 1, 5, 0.53, 0.02, 2.3),
    ("CNN/DM", "base", 1, 3, 0.55, 0.04, 2.2),
    ("CNN/DM", "large", 1, 3, 0.56, 0.11, 1.7),
)

_GUIDE_COST = 0.1
_GUIDE = ((2, 0.8), (4, 0.7), (6, 0.6), (8, 0.5))  # gamma and accepted / drafted, assumed by the practice guide


def gamma_table(settings: TheorySettings, run: TheoryPoint | None) -> str:
    alpha = settings.alpha
    rows = [
        (
            gamma,
            accepted_share(alpha, gamma),
            expected_tokens(alpha, gamma),
            walltime_improvement(alpha, gamma, settings.c),
            settings.modelled_speedup(gamma),
            operations(alpha, gamma, settings.c_hat),
        )
        for gamma in sorted({1, 2, 3, 4, 6, 8, 12, 16, settings.gamma})
    ]
    head = ("γ", "accepted / drafted", "tokens per pass", "Theorem 3.8", "with v and o", "operations")
    if run:
        rows.append((_run_label(run.gamma), run.share, run.tokens, run.theorem, run.speedup, run.operations))
    note = " The last row is this run: measured, except Theorem 3.8." if run else ""
    return (
        f"α = {alpha:g} is the acceptance probability per *tested* token. It does not depend on γ. "
        "Other reports define α as accepted / drafted. That ratio falls as γ grows: tokens after a rejection are "
        f"not tested.{note}\n\n{figures_table(head, rows)}"
    )


def leviathan_table_1(run: TheoryPoint | None) -> str:
    rows: list[Sequence[object]] = [
        (alpha, gamma, operations(alpha, gamma, 0), walltime_improvement(alpha, gamma, 0))
        for alpha, gamma in _LEVIATHAN_1
    ]
    if run:
        rows.append((_run_label(run.alpha), run.gamma, run.operations, run.speedup))
    note = " The row of this run includes its drafting cost." if run else ""
    return (
        f"Leviathan et al., Table 1, computed for c = ĉ = 0.{note}\n\n"
        f"{figures_table(('α', 'γ', 'operations', 'speed-up'), rows)}"
    )


def leviathan_table_2(run: TheoryPoint | None) -> str:
    """Published measurements and the speed-up of Theorem 3.8."""
    rows: list[Sequence[object]] = []
    for task, drafter, temperature, gamma, alpha, c, measured in _LEVIATHAN_2:
        theorem = walltime_improvement(alpha, gamma, c)
        name = f"{task}, T5-{drafter}"
        rows.append((name, str(temperature), gamma, alpha, c, f"{measured:.1f}", theorem, f"{measured / theorem:.0%}"))
    if run:
        realised = f"{run.speedup / run.theorem:.0%}" if run.speedup and run.theorem else None
        name, temperature = _run_label(run.method), f"{run.temperature:g}"
        rows.append((name, temperature, run.gamma, run.alpha, run.c, run.speedup, run.theorem, realised))
    head = ("task, drafter", "T", "γ", "α", "c", "measured", "Theorem 3.8", "realised")
    return (
        "Leviathan et al., Table 2: T5-XXL on a TPU v4, batch size 1. "
        f"Speed-ups are measured by the authors; Theorem 3.8 is computed.\n\n{figures_table(head, rows)}"
    )


def guide_table(run: TheoryPoint | None) -> str:
    """Convert accepted / drafted to alpha per tested token; both formulas yield the same speed-up."""
    inputs: list[tuple[object, float, float, float | None]] = [
        (gamma, gamma, share, _GUIDE_COST) for gamma, share in _GUIDE
    ]
    if run:
        inputs.append((_run_label(run.gamma), run.gamma, run.share, run.c))
    rows = []
    for label, gamma, share, c in inputs:
        alpha = alpha_of_share(share, gamma)
        speedups = (None, None)
        if c is not None:
            speedups = (share_speedup(share, gamma, c), walltime_improvement(alpha, gamma, c))
        rows.append((label, share, c, speedups[0], alpha, speedups[1]))
    head = ("γ", "accepted / drafted", "c", "(1 + γα) / (1 + γc)", "α per tested token", "Theorem 3.8")
    return (
        "The practice guide defines α as accepted / drafted. The table converts it to α per tested token. "
        "Each formula is correct for its definition of α.\n\n" + figures_table(head, rows)
    )


def figures_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows in Markdown: two digits, halves rounded up as in the papers, dash for None."""

    def cell(value: object) -> str:
        if value is None:
            return "–"
        return f"{value + 1e-9:.2f}" if isinstance(value, float) else str(value)

    return markdown_table(head, [[cell(value) for value in row] for row in rows])


def _run_label(value: object) -> str:
    return f"**this run**, {value:.2f}" if isinstance(value, float) else f"**this run**, {value}"
