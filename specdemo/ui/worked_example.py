"""The worked example of the theory tab: p and q over four tokens, what becomes of each, and a trial of a rule.

Everything is computed by the program's own rules. Knows laws, not gradio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from specdemo.core.errors import UserError
from specdemo.core.rules import RULES, residual
from specdemo.core.sampling import SamplingParams
from specdemo.core.simulate import Trial, chance_distance, distance, rare_distance, trial
from specdemo.core.theory import bretagnolle_huber, divergence, overlap, pinsker
from specdemo.ui.theory_tables import table

TOKENS = "abcd"
P = (0.45, 0.32, 0.18, 0.05)  # laws on which every lossy rule shows
Q = (0.20, 0.30, 0.15, 0.35)
COUNT = 10_000
UNADJUSTED = "rejection, corrections drawn from p: lossy"
PARTS_ORDER = [f"{probs}({token})" for token in TOKENS for probs in "pq"]
SHARES_ORDER = [f"{token} {part}" for token in TOKENS for part in ("p", "drawn", "q")]

Bar = tuple[str, float, str]  # label, height, part


def choices() -> dict[str, tuple[str, bool]]:
    """Every rule by its title, with and without what may be left out of it: name, and whether it adjusts."""
    found = {f"{name}: {rule.title}": (name, True) for name, rule in RULES.items()}
    return found | {UNADJUSTED: ("rejection", False)}


def reference_probs(name: str, values: Sequence[float | None]) -> tuple[list[float], str]:
    """The law that was typed, and a word about it if it had to be normalised. `UserError` where it cannot be one."""
    given: list[float] = []
    for token, value in zip(TOKENS, values, strict=True):
        if value is None or not math.isfinite(value):
            raise UserError(f"{name}({token}) must be a number, not {'empty' if value is None else value}")
        if value < 0:
            raise UserError(f"{name}({token}) is {value:g}: a probability is not below 0")
        given.append(value)
    total = sum(given)
    if not 0 < total < math.inf:
        raise UserError(
            f"{name} adds up to {total:g}: give at least one token a probability above 0, and none a huge one"
        )
    probs = [value / total for value in given]
    note = "" if abs(total - 1) < 1e-9 else f"{name} adds up to {total:g}, so it was divided by that. "
    return probs, note


def example_words(p: Sequence[float], q: Sequence[float]) -> str:
    """Token by token why the text has the law p, and how far apart the two are."""
    beta, kl = overlap(p, q), divergence(p, q)
    left = residual(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)).tolist()
    rows = []
    for token, a, b, r in zip(TOKENS, p, q, left, strict=True):
        kept, corrected = min(a, b), (1 - beta) * r
        sums = f"{kept:.3f} + {corrected:.3f} = {kept + corrected:.3f}"
        rows.append((token, *(f"{x:.3f}" for x in (a, b, kept, max(a - b, 0), r)), sums))
    head = ("token", "p", "q", "kept: min(p, q)", "max(p − q, 0)", "residual", "kept + (1 − β) · residual")
    unbound, far = 1 / (1 + kl), f"{kl:.3f}" if kl < math.inf else "∞"
    quoted = "It holds here." if unbound <= beta else "It fails here."
    return "\n\n".join(
        [
            f"A token drawn from q is kept with min(1, p/q), so it is drafted and kept with min(p, q). In all "
            f"**β = {beta:.3f}** is kept. With the other {1 - beta:.3f} a correction is drawn from the residual, "
            "max(p − q, 0) made to add up to 1. The last column adds up to p.",
            table(head, rows),
            f"KL(p‖q) = {far}, so β is at least {pinsker(kl):.3f} (Pinsker, 1 − √(KL/2)) and at least "
            f"{bretagnolle_huber(kl):.3f} (Bretagnolle and Huber, e^(−KL)/2). 1/(1 + KL) = {unbound:.3f} is often "
            f"quoted and is no bound. {quoted}",
        ]
    )


def example_bars(p: Sequence[float], q: Sequence[float]) -> list[Bar]:
    """p as kept and corrected, q as kept and rejected."""
    bars = []
    for token, a, b in zip(TOKENS, p, q, strict=True):
        bars += [(f"p({token})", max(a - b, 0.0), "correction"), (f"p({token})", min(a, b), "kept")]
        bars += [(f"q({token})", max(b - a, 0.0), "rejected"), (f"q({token})", min(a, b), "kept")]
    return bars


def try_rule(choice: str, p: Sequence[float], q: Sequence[float], gamma: int, seed: int) -> Trial:
    """10,000 tokens under a rule of `choices`."""
    if choice not in choices():
        raise UserError(f"unknown rule {choice}: known are {', '.join(choices())}")
    name, adjust = choices()[choice]
    return trial(name, torch.tensor(p), torch.tensor(q), gamma, COUNT, seed, adjust=adjust)


def trial_words(choice: str, done: Trial, p: Sequence[float], q: Sequence[float]) -> str:
    """Did the law come out as p, within what chance allows?"""
    name, adjust = choices()[choice]
    exact = RULES[name].exact(SamplingParams()) and adjust
    shares, count = done.shares(len(p)), len(done.tokens)
    off, usual, rare = distance(shares, p), chance_distance(p, count), rare_distance(p, count)
    if off <= rare:
        said = (
            "**The law is p**, as far as so many tokens can tell." if exact else "**No difference seen** on these laws."
        )
        said += " This rule is exact at any temperature." if exact else " The rule is lossy all the same: try others."
    else:
        said = "**The law is not p.** " + (
            "This should happen once in a thousand trials: draw again." if exact else "The rule is lossy."
        )
    rows = [
        (token, *(f"{x:.3f}" for x in (a, b, share)), f"{share - a:+.3f}".replace("-", "−"))
        for token, a, b, share in zip(TOKENS, p, q, shares, strict=True)
    ]
    return "\n\n".join(
        [
            f"{said} The shares of {count:,} tokens are {off:.4f} away from p (half the sum of |share − p|). Tokens "
            f"drawn from p itself are {usual:.4f} away on average, and above {rare:.4f} at most once in a thousand "
            f"trials. {done.accepted:,} of {done.tested:,} tested tokens were accepted, in {done.rounds:,} rounds.",
            table(("token", "p", "q", "drawn", "drawn − p"), rows),
        ]
    )


def trial_bars(done: Trial, p: Sequence[float], q: Sequence[float]) -> list[Bar]:
    """p, what was drawn, and q, side by side."""
    shares = done.shares(len(p))
    return [
        (f"{token} {part}", height, part)
        for token, *heights in zip(TOKENS, p, shares, q, strict=True)
        for part, height in zip(("p", "drawn", "q"), heights, strict=True)
    ]
