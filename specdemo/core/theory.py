"""The closed forms of speculative decoding.

`alpha` is Leviathan's: E[beta], the chance that one tested token is accepted (2211.17192, section 3.1); it does not
depend on gamma. The other alpha of the literature, accepted / drafted, falls with gamma and is called `share` here. `c`
is the drafter's time for a token over the target's. Knows numbers only; laws are sequences of probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def expected_tokens(alpha: float, gamma: float) -> float:
    """Tokens per target pass, (1 - alpha^(gamma+1)) / (1 - alpha) (2211.17192, eq. 1)."""
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def accepted_share(alpha: float, gamma: float) -> float:
    """Expected accepted / drafted, gamma > 0: eq. 1 of 2211.17192 less the target's own token, over gamma."""
    return (expected_tokens(alpha, gamma) - 1) / gamma


def alpha_of_share(share: float, gamma: float) -> float:
    """The alpha whose `accepted_share` at this gamma > 0 is `share` (from 0 to 1): that grows with alpha, so bisect."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_share(middle, gamma) < share else (low, middle)
    return high


def walltime_improvement(alpha: float, gamma: float, c: float) -> float:
    """Speed-up over plain decoding where verification costs one step (2211.17192, Theorem 3.8)."""
    return speedup(expected_tokens(alpha, gamma), gamma, c)


def speedup(tokens: float, drafted: float, c: float, v: float = 1.0, o: float = 0.0) -> float:
    """The cost model: `tokens` per round over what a round costs, in passes over one row.

    A round drafts `drafted` tokens at `c` each, verifies them in one pass that costs `v`, and spends `o` on everything
    else. Theorem 3.8 is the case v = 1, o = 0 with the expected number of tokens.
    """
    return tokens / (v + drafted * c + o)


def share_speedup(share: float, gamma: float, c: float) -> float:
    """(1 + gamma alpha) / (1 + gamma rho), as practice guides have it: alpha is accepted / drafted, rho is `c`.

    With `share = accepted_share(alpha, gamma)` this is Theorem 3.8 in other letters.
    """
    return speedup(1 + gamma * share, gamma, c)


def operations(alpha: float, gamma: float, c: float) -> float:
    """Arithmetic operations per token over those of plain decoding (2211.17192, Theorem 3.11).

    `c` is the drafter's operations for a token over the target's, the paper's c with a hat.
    """
    return (gamma * c + gamma + 1) / expected_tokens(alpha, gamma)


def can_improve(alpha: float, c: float) -> bool:
    """Whether any gamma improves the walltime (2211.17192, Corollary 3.9; the converse holds too).

    Gamma tokens win alpha + ... + alpha^gamma and cost gamma c: on average no more than alpha each, at c each.
    """
    return alpha > c


def least_improvement(alpha: float, c: float) -> float:
    """(1 + alpha) / (1 + c): what gamma = 1 gives, so the best gives no less (2211.17192, Corollary 3.9)."""
    return (1 + alpha) / (1 + c)


def best_gamma(
    alpha: float, c: float, longest: int = 64, v: Callable[[int], float] = lambda rows: 1.0, o: float = 0.0
) -> int:
    """The draft length with the largest speed-up; 0 where none improves (2211.17192, section 3.5).

    `v(rows)` is the cost of a pass over so many rows, as in `speedup`; left out, Theorem 3.8 decides.
    """

    def gain(gamma: int) -> float:
        return speedup(expected_tokens(alpha, gamma), gamma, c, v(gamma + 1), o) if gamma else 1.0

    return max(range(longest + 1), key=gain)


def thumb_gamma(c: float) -> float:
    """sqrt(1 / rho - 1), rho = `c` > 0: a rule of thumb that knows nothing of acceptance; see `best_gamma`."""
    return math.sqrt(max(0.0, 1 / c - 1))


def overlap(p: Sequence[float], q: Sequence[float]) -> float:
    """beta = sum min(p, q) = 1 - D_LK(p, q), the chance that a token of q is accepted (2211.17192, Theorem 3.5)."""
    return sum(map(min, p, q))


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q) in nats; infinite where q lacks a token of p."""
    pairs = [(a, b) for a, b in zip(p, q, strict=True) if a > 0]
    return math.inf if any(b == 0 for _, b in pairs) else max(0.0, sum(a * math.log(a / b) for a, b in pairs))


def pinsker(kl: float) -> float:
    """beta >= 1 - sqrt(KL / 2): Pinsker's inequality, of use where KL < 2."""
    return max(0.0, 1 - math.sqrt(kl / 2))


def bretagnolle_huber(kl: float) -> float:
    """beta >= exp(-KL) / 2: Bretagnolle and Huber's inequality, of use where KL is large.

    The bound 1 / (1 + KL), often quoted, does not hold: p = (1, 0), q = (e, 1 - e) has beta = e and KL = -ln e.
    """
    return math.exp(-kl) / 2


def speedup_over(alpha: float, gamma: float, c: float, r: float, v: float = 1.0) -> float:
    """Tokens per second over a link, in plain steps of the target: S = E[tokens] / (v + gamma c + r).

    `r` is the round-trip time in such steps, `v` what a pass over the draft costs. 1 is a target at hand.
    """
    return speedup(expected_tokens(alpha, gamma), gamma, c, v, r)


def best_gamma_over(alpha: float, c: float, r: float, longest: int = 64) -> int:
    """The draft length with the most tokens per second over a link: the longer the round trip, the longer."""
    return max(range(longest + 1), key=lambda gamma: speedup_over(alpha, gamma, c, r))
