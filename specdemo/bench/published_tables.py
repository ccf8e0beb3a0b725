"""Tables of published figures, and of measured acceptance next to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdemo.bench.table import BenchRow, markdown_table
from specdemo.core.formats import number
from specdemo.core.published import LEVIATHAN_2, LEVIATHAN_3, NASD_ACCEPTANCE
from specdemo.core.theory import walltime_improvement

_REPETITION = {  # classes of prompts of each row
    "long repetition": ("repetitive", "rewriting"),
    "short repetition": ("code", "list"),
    "no repetition": ("adversarial", "random"),
}


def repetition_table(rows: Sequence[BenchRow]) -> str:
    """Return the NASD document's table with the measured alpha of each lane; empty without NASD."""
    drafting = [row for row in rows if row.alpha is not None]
    if not any(row.lane.startswith("nasd") for row in drafting):
        return ""
    cells = []
    for repetition, model, ngrams in NASD_ACCEPTANCE:
        for row in _of_classes(drafting, _REPETITION[repetition]):
            expected = ngrams if row.lane.startswith(("nasd", "suffix", "lookup")) else model
            cells.append((repetition, row.kind, row.lane, expected, number(row.alpha, 2)))
    head = ("text", "class", "lane", "expected by the document", "measured alpha")
    return f"Acceptance by repetition of the text:\n\n{markdown_table(head, cells)}" if cells else ""


def _of_classes(rows: Iterable[BenchRow], kinds: Sequence[str]) -> list[BenchRow]:
    return [row for row in rows if row.kind in kinds]


def leviathan_tables() -> str:
    """Return Tables 2 and 3 of Leviathan et al. (2211.17192), with the speed-up of Theorem 3.8."""
    measured = [
        (task, f"T5-{drafter}", f"{t:g}", gamma, f"{c:.2f}", f"{alpha:.2f}", f"{speedup:.1f}",
         f"{walltime_improvement(alpha, gamma, c):.2f}")
        for task, drafter, t, gamma, alpha, c, speedup in LEVIATHAN_2
    ]  # fmt: skip
    alphas = [(target, drafter, f"{greedy:.2f}", f"{sampled:.2f}") for target, drafter, greedy, sampled in LEVIATHAN_3]
    speeds = markdown_table(("task", "drafter", "T", "gamma", "c", "alpha", "speed-up", "Thm 3.8"), measured)
    rates = markdown_table(("target", "drafter", "alpha, T = 0", "alpha, T = 1"), alphas)
    return (
        f"Published (Leviathan et al., Table 2: T5-XXL on a TPU v4, batch size 1):\n\n{speeds}\n\n"
        f"Published (Leviathan et al., Table 3):\n\n{rates}"
    )
