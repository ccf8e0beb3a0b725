"""The closed forms of speculative decoding.

`alpha` is Leviathan's: E[beta], the chance that one tested token is accepted (2211.17192, section 3.1). `c` is the
drafter's time for a token over the target's.
"""

from __future__ import annotations


def expected_tokens(alpha: float, gamma: float) -> float:
    """Tokens per target pass, (1 - alpha^(gamma+1)) / (1 - alpha) (2211.17192, eq. 1)."""
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def walltime_improvement(alpha: float, gamma: float, c: float) -> float:
    """Speed-up over plain decoding where verification costs one step (2211.17192, Theorem 3.8)."""
    return speedup(expected_tokens(alpha, gamma), gamma, c)


def speedup(tokens: float, drafted: float, c: float, v: float = 1.0, o: float = 0.0) -> float:
    """The cost model: `tokens` per round over what a round costs, in passes over one row.

    A round drafts `drafted` tokens at `c` each, verifies them in one pass that costs `v`, and spends `o` on everything
    else. Theorem 3.8 is the case v = 1, o = 0 with the expected number of tokens.
    """
    return tokens / (v + drafted * c + o)


def best_gamma(alpha: float, c: float, longest: int = 64) -> int:
    """The draft length with the largest walltime improvement; 0 where none improves (Corollary 3.9)."""
    return max(range(longest + 1), key=lambda gamma: walltime_improvement(alpha, gamma, c))


def speedup_over(alpha: float, gamma: float, c: float, r: float, v: float = 1.0) -> float:
    """Tokens per second over a link, in plain steps of the target: S = E[tokens] / (v + gamma c + r).

    `r` is the round-trip time in such steps, `v` what a pass over the draft costs. 1 is a target at hand.
    """
    return speedup(expected_tokens(alpha, gamma), gamma, c, v, r)


def best_gamma_over(alpha: float, c: float, r: float, longest: int = 64) -> int:
    """The draft length with the most tokens per second over a link: the longer the round trip, the longer."""
    return max(range(longest + 1), key=lambda gamma: speedup_over(alpha, gamma, c, r))
