"""Tables of published figures, and of measured acceptance next to them."""

from __future__ import annotations

from collections.abc import Sequence

from specdemo.bench.table import BenchRow, markdown_table
from specdemo.core.formats import number
from specdemo.core.theory import alpha_of_share, alpha_of_speedup, operations, share_speedup, walltime_improvement

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
        for row in drafting:
            if row.kind not in _REPETITION[repetition]:
                continue
            expected = ngrams if row.lane.startswith(("nasd", "suffix", "lookup")) else model
            cells.append((repetition, row.kind, row.lane, expected, number(row.alpha, 2)))
    head = ("text", "class", "lane", "expected by the document", "measured alpha")
    return f"Acceptance by repetition of the text:\n\n{markdown_table(head, cells)}" if cells else ""


def leviathan_tables() -> str:
    """Return Tables 2 and 3 of Leviathan et al. (2211.17192), with the speed-up of Theorem 3.8."""
    measured = []
    for task, drafter, t, gamma, alpha, c, speedup in LEVIATHAN_2:
        theorem = walltime_improvement(alpha, gamma, c)
        inputs = (task, f"T5-{drafter}", f"{t:g}", gamma, f"{c:.2f}", f"{alpha:.2f}")
        measured.append((*inputs, f"{speedup:.1f}", f"{theorem:.2f}", f"{speedup / theorem:.0%}"))
    alphas = [(target, drafter, f"{greedy:.2f}", f"{sampled:.2f}") for target, drafter, greedy, sampled in LEVIATHAN_3]
    speeds = markdown_table(
        ("task", "drafter", "T", "gamma", "c", "alpha", "speed-up", "Thm 3.8", "realised"), measured
    )
    rates = markdown_table(("target", "drafter", "alpha, T = 0", "alpha, T = 1"), alphas)
    return (
        f"Published (Leviathan et al., Table 2: T5-XXL on a TPU v4, batch size 1):\n\n{speeds}\n\n"
        f"Published (Leviathan et al., Table 3):\n\n{rates}"
    )


def published_figures() -> str:
    """Return published figures about the closed forms, next to computed figures."""
    guide = []
    for gamma, share in ((2, 0.8), (4, 0.7), (6, 0.6), (8, 0.5)):
        alpha = alpha_of_share(share, gamma)
        figures = share_speedup(share, gamma, 0.1), alpha, walltime_improvement(alpha, gamma, 0.1)
        guide.append((gamma, f"{share:.2f}", "0.10", *map(_rounded, figures)))
    costless = [
        (f"{alpha:.2f}", gamma, *map(_rounded, (operations(alpha, gamma, 0), walltime_improvement(alpha, gamma, 0))))
        for alpha, gamma in ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))
    ]
    chinchilla = [
        (task, 4, "0.128", f"{speedup:.2f}", _rounded(alpha_of_speedup(speedup, 4, 0.128)))
        for task, speedup in (("XSum, nucleus", 1.92), ("XSum, greedy", 2.01), ("HumanEval, nucleus", 2.46))
    ]
    head = ("γ", "accepted / drafted", "c", "(1 + γα) / (1 + γc)", "α per tested token", "Theorem 3.8")
    parts = (
        "The practice guide defines α as accepted / drafted. The table converts it to α per tested token. Each formula "
        "is correct for its definition of α.",
        markdown_table(head, guide),
        "Leviathan et al., Table 1, computed for c = ĉ = 0.",
        markdown_table(("α", "γ", "operations", "speed-up"), costless),
        leviathan_tables(),
        "Chen et al. 2302.01318, Table 1: Chinchilla 70B with a drafter of 4B, batch size 1. Speed-ups are measured by "
        "the authors. The last column is computed: the α that explains the speed-up.",
        markdown_table(("task", "γ", "c", "measured", "α for Theorem 3.8"), chinchilla),
    )
    return "\n\n".join(parts)


def _rounded(value: float) -> str:
    return number(value + 1e-9, 2)  # halves are rounded up, as in the papers


# Leviathan et al. 2211.17192, Table 2 and appendix: T5-XXL (11B) on a TPU v4, batch size 1.
# Task, drafter, temperature, gamma, alpha, c, measured speed-up.
LEVIATHAN_2 = (
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

# Leviathan et al. 2211.17192, Table 3: target, drafter, alpha at temperature 0 and 1.
LEVIATHAN_3 = (
    ("GPT-like 97M", "unigram", 0.03, 0.03),
    ("GPT-like 97M", "bigram", 0.05, 0.05),
    ("GPT-like 97M", "GPT-like 6M", 0.88, 0.89),
    ("T5-XXL EnDe", "unigram", 0.08, 0.07),
    ("T5-XXL EnDe", "bigram", 0.20, 0.19),
    ("T5-XXL EnDe", "T5-small", 0.75, 0.62),
    ("T5-XXL EnDe", "T5-base", 0.80, 0.68),
    ("T5-XXL EnDe", "T5-large", 0.82, 0.71),
    ("T5-XXL CNN/DM", "unigram", 0.13, 0.08),
    ("T5-XXL CNN/DM", "bigram", 0.23, 0.16),
    ("T5-XXL CNN/DM", "T5-small", 0.65, 0.53),
    ("T5-XXL CNN/DM", "T5-base", 0.73, 0.55),
    ("T5-XXL CNN/DM", "T5-large", 0.74, 0.56),
    ("LaMDA 137B", "LaMDA 100M", 0.61, 0.57),
    ("LaMDA 137B", "LaMDA 2B", 0.71, 0.71),
    ("LaMDA 137B", "LaMDA 8B", 0.75, 0.74),
)

# Theory of NASD, section 4.3, an expectation: repetition in the text, acceptance of a draft model, of n-grams.
NASD_ACCEPTANCE = (
    ("long repetition", "high", "close to 1.0"),
    ("short repetition", "high", "0.5 to 0.7"),
    ("no repetition", "medium", "0.3 to 0.5"),
)
