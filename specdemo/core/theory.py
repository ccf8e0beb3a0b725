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
