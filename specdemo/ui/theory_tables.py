"""The tables of the theory tab, in Markdown, each with the run's own row. Knows closed forms, not gradio.

Measured figures of others are quoted with their source; everything else is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdemo.core.theory import (
    accepted_share,
    alpha_of_share,
    expected_tokens,
    operations,
    share_speedup,
    walltime_improvement,
)
from specdemo.ui.theory_curves import Settings
from specdemo.ui.theory_point import TheoryPoint

# 2211.17192, Table 1: alpha and gamma, at c = 0.
TABLE_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))

# 2211.17192, Table 2 and its appendix: T5-XXL (11B) on a TPU v4, one text at a time.
# Task, drafter, temperature, gamma, alpha, c, measured speed-up.
TABLE_2 = (
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

GUIDE_RHO = 0.1
GUIDE = ((2, 0.8), (4, 0.7), (6, 0.6), (8, 0.5))  # gamma and accepted / drafted, as the practice guide assumes them


def by_gamma(at: Settings, point: TheoryPoint | None) -> str:
    """Everything by draft length, at the sliders' alpha."""
    rows = [
        (
            gamma,
            accepted_share(at.alpha, gamma),
            expected_tokens(at.alpha, gamma),
            walltime_improvement(at.alpha, gamma, at.c),
            at.gain(gamma),
            operations(at.alpha, gamma, at.c_hat),
        )
        for gamma in sorted({1, 2, 3, 4, 6, 8, 12, 16, at.gamma})
    ]
    head = ("γ", "accepted / drafted", "tokens per pass", "Theorem 3.8", "with v and o", "operations")
    if point:
        rows.append((_run(point.gamma), point.share, point.tokens, point.theorem, point.speedup, point.operations))
    note = " The last row is this run: measured, but for Theorem 3.8." if point else ""
    return (
        f"At α = {at.alpha:g}, the chance that a *tested* token is kept, whatever γ is. Other reports call accepted / "
        "drafted α; what stands behind a rejection is drafted and never tested, so that one falls as γ grows."
        f"{note}\n\n{table(head, rows)}"
    )


def leviathan_1(point: TheoryPoint | None) -> str:
    """Speed against operations where drafting costs nothing."""
    rows: list[Sequence[object]] = [
        (alpha, gamma, operations(alpha, gamma, 0), walltime_improvement(alpha, gamma, 0)) for alpha, gamma in TABLE_1
    ]
    if point:
        rows.append((_run(point.alpha), point.gamma, point.operations, point.speedup))
    note = " This run paid for its drafts." if point else ""
    return (
        f"Leviathan et al., Table 1, computed: c and ĉ are 0.{note}\n\n"
        f"{table(('α', 'γ', 'operations', 'speed-up'), rows)}"
    )


def leviathan_2(point: TheoryPoint | None) -> str:
    """What others measured against the theorem."""
    rows: list[Sequence[object]] = []
    for task, drafter, temperature, gamma, alpha, c, measured in TABLE_2:
        theorem = walltime_improvement(alpha, gamma, c)
        name = f"{task}, T5-{drafter}"
        rows.append((name, str(temperature), gamma, alpha, c, f"{measured:.1f}", theorem, f"{measured / theorem:.0%}"))
    if point:
        share = f"{point.speedup / point.theorem:.0%}" if point.speedup and point.theorem else None
        start = (_run(point.method), f"{point.temperature:g}")
        rows.append((*start, point.gamma, point.alpha, point.c, point.speedup, point.theorem, share))
    return (
        "Leviathan et al., Table 2: measured by them, T5-XXL on a TPU v4, one text at a time; the theorem is computed."
        "\n\n" + table(("what", "T", "γ", "α", "c", "measured", "Theorem 3.8", "realised"), rows)
    )


def guide(point: TheoryPoint | None) -> str:
    """One alpha turned into the other: two formulas, the same speed-up."""
    given: list[tuple[object, float, float, float | None]] = [
        (gamma, gamma, share, GUIDE_RHO) for gamma, share in GUIDE
    ]
    if point:
        given.append((_run(point.gamma), point.gamma, point.share, point.c))
    rows = []
    for name, gamma, share, rho in given:
        alpha = alpha_of_share(share, gamma)
        both = (None, None)
        if rho is not None:
            both = (share_speedup(share, gamma, rho), walltime_improvement(alpha, gamma, rho))
        rows.append((name, share, rho, both[0], alpha, both[1]))
    head = ("γ", "accepted / drafted", "c", "(1 + γα) / (1 + γc)", "α per tested token", "Theorem 3.8")
    return (
        "The practice guide's table. Its α is accepted / drafted; the α per tested token that would give it follows, "
        "and with that Theorem 3.8 says the same. Both formulas are right, each for its own α.\n\n" + table(head, rows)
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown; fractions with two digits, halves up as papers print them; a dash for what is not known."""

    def cell(value: object) -> str:
        if value is None:
            return "–"
        return f"{value + 1e-9:.2f}" if isinstance(value, float) else str(value)

    lines = [head, ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _run(value: object) -> str:
    return f"**this run**, {value:.2f}" if isinstance(value, float) else f"**this run**, {value}"
