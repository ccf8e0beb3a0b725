"""What the theory tab says and draws for given alpha, c, gamma, v and o: curves and sentences.

Curves are rows (x, y, series); a series of one row is a dot, and one of None has no place yet. Knows closed forms and a
run's point, not gradio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdemo.core.theory import (
    accepted_share,
    best_gamma,
    can_improve,
    expected_tokens,
    least_improvement,
    operations,
    speedup,
    thumb_gamma,
    walltime_improvement,
)
from specdemo.ui.theory_point import TheoryPoint

SET, DOT, RUN, PLAIN = "set", "sliders", "this run", "plain"
THEOREM, SHARE = "Theorem 3.8", "accepted / drafted"
GAMMAS = (1, 3, 10)
COSTS = (0.01, 0.05, 0.2)
ENDLESS = "∞"
LONGEST = 64  # the longest draft looked at for the best
ALPHAS = [i / 50 for i in range(51)]

Row = tuple[float | None, float | None, str]

BOUNDS = {  # of each slider: least, most, step
    "alpha": (0, 1, 0.01),
    "c": (0, 2, 0.01),
    "gamma": (1, 16, 1),
    "v": (0.5, 5, 0.01),
    "o": (0, 2, 0.01),
    "c_hat": (0, 2, 0.01),
}


@dataclass(frozen=True)
class Settings:
    """Where the sliders stand."""

    alpha: float = 0.8
    c: float = 0.05
    gamma: int = 5
    v: float = 1.0  # a pass over gamma + 1 rows
    o: float = 0.0
    c_hat: float = 0.05

    def rows(self, rows: int) -> float:
        """v of any number of rows: what lies above one plain pass grows evenly with the rows, what lies below stays."""
        if rows == 1:
            return 1.0
        return 1 + (self.v - 1) * (rows - 1) / self.gamma if self.v > 1 else self.v

    def gain(self, gamma: int) -> float:
        """The cost model's speed-up at any draft length."""
        tokens = expected_tokens(self.alpha, gamma)
        return speedup(tokens, gamma, self.c, self.rows(gamma + 1), self.o) if gamma else 1.0

    @property
    def best(self) -> int:
        """The draft length that gains most."""
        return best_gamma(self.alpha, self.c, LONGEST, self.rows, self.o)


def settings_from(values: Sequence[Any]) -> Settings | None:
    """The sliders' places from raw values in the order of `BOUNDS`; None while one of them is half typed."""
    for value, (least, most, _) in zip(values, BOUNDS.values(), strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            return None
    given = dict(zip(BOUNDS, values, strict=True))
    return Settings(**given | {"gamma": round(given["gamma"])})


def settings_of(point: TheoryPoint) -> Settings:
    """The sliders' places for a run, as near as they go; what was not measured keeps its usual place."""
    usual = Settings()
    places = {}
    for name, (least, most, step) in BOUNDS.items():
        measured = getattr(point, name)
        near = round(min(most, max(least, measured)), 0 if step == 1 else 2) if measured is not None else None
        places[name] = getattr(usual, name) if near is None else near
    return Settings(**places | {"gamma": int(places["gamma"])})


def token_curves(at: Settings, point: TheoryPoint | None) -> list[Row]:
    """Expected tokens per pass over alpha (2211.17192, Figure 2)."""
    highest = max(11.0, at.gamma + 1, point.tokens if point else 0)
    rows = list(_over_alpha(expected_tokens))
    rows += [(alpha, 1 / (1 - alpha), ENDLESS) for alpha in ALPHAS[:-1] if 1 / (1 - alpha) <= highest]
    return rows + _at(at, expected_tokens, point, point and point.tokens)


def speed_curves(at: Settings, point: TheoryPoint | None) -> list[Row]:
    """Speed-up over alpha: Theorem 3.8 for some gammas, the cost model for the one set (2211.17192, Figure 4)."""

    def modelled(alpha: float, gamma: float) -> float:
        return speedup(expected_tokens(alpha, gamma), gamma, at.c, at.v, at.o)

    rows = [(0.0, 1.0, PLAIN), (1.0, 1.0, PLAIN)]
    rows += _over_alpha(lambda alpha, gamma: walltime_improvement(alpha, gamma, at.c))
    return rows + _at(at, modelled, point, point and point.speedup)


def operation_curves(at: Settings, point: TheoryPoint | None) -> list[Row]:
    """Operations per token over alpha (2211.17192, Figure 4)."""

    def more(alpha: float, gamma: float) -> float:
        return operations(alpha, gamma, at.c_hat)

    return [*_over_alpha(more), *_at(at, more, point, point and point.operations)]


def best_curves(at: Settings, point: TheoryPoint | None, longest: int = 20) -> list[Row]:
    """The best gamma over alpha: Theorem 3.8 for some c, the cost model for the one set (2211.17192, Figure 3)."""
    rows = [(alpha, best_gamma(alpha, c, longest), str(c)) for c in COSTS for alpha in ALPHAS]
    rows += [(alpha, best_gamma(alpha, at.c, longest, at.rows, at.o), SET) for alpha in ALPHAS]
    rows.append((at.alpha, min(at.gamma, longest), DOT))
    return [*rows, _dot(point and point.alpha, point and min(point.gamma, longest))]


def gamma_curves(at: Settings, point: TheoryPoint | None) -> list[Row]:
    """Speed-up over gamma: by Theorem 3.8, and with v and o."""
    gammas = range(17)
    rows = [(0.0, 1.0, PLAIN), (16.0, 1.0, PLAIN)]
    rows += [(gamma, walltime_improvement(at.alpha, gamma, at.c), THEOREM) for gamma in gammas]
    rows += [(gamma, at.gain(gamma), SET) for gamma in gammas]
    rows.append((at.gamma, at.gain(at.gamma), DOT))
    return [*rows, _dot(point and point.gamma, point and point.speedup)]


def share_curves(at: Settings, point: TheoryPoint | None) -> list[Row]:
    """Over gamma, the two figures that go by the name of alpha: the one set does not move, the other falls."""
    rows: list[Row] = [(gamma, at.alpha, SET) for gamma in range(1, 17)]
    rows += [(gamma, accepted_share(at.alpha, gamma), SHARE) for gamma in range(1, 17)]
    rows.append((at.gamma, accepted_share(at.alpha, at.gamma), DOT))
    return [*rows, _dot(point and point.gamma, point and point.share)]


def _over_alpha(value: Callable[[float, float], float]) -> Iterator[Row]:
    return ((alpha, value(alpha, gamma), str(gamma)) for gamma in GAMMAS for alpha in ALPHAS)


def _at(
    at: Settings, value: Callable[[float, float], float], point: TheoryPoint | None, measured: float | None
) -> list[Row]:
    """Over alpha, the curve of the gamma that is set, the sliders' dot on it, and the run's dot."""
    rows: list[Row] = [(alpha, value(alpha, at.gamma), SET) for alpha in ALPHAS]
    return [*rows, (at.alpha, value(at.alpha, at.gamma), DOT), _dot(point and point.alpha, measured)]


def _dot(x: float | None, y: float | None) -> Row:
    """The run's dot, or its place in the legend alone."""
    return (None, None, RUN) if x is None or y is None else (x, y, RUN)


def set_words(at: Settings) -> str:
    """What follows from the sliders, in a few lines of Markdown."""
    theorem, model, best, plain_best = (
        walltime_improvement(at.alpha, at.gamma, at.c),
        at.gain(at.gamma),
        at.best,
        best_gamma(at.alpha, at.c, LONGEST),
    )
    lines = [
        f"A round gives **{expected_tokens(at.alpha, at.gamma):.2f} tokens** on average, (1 − α^(γ+1)) / (1 − α), and "
        f"keeps {accepted_share(at.alpha, at.gamma):.2f} of what it drafts.",
        f"Speed-up: **{theorem:.2f}×** by Theorem 3.8, (1 − α^(γ+1)) / ((1 − α)(γc + 1)); **{model:.2f}×** once v and "
        f"o are paid, tokens / (v + γc + o).",
        f"Operations per token: **{operations(at.alpha, at.gamma, at.c_hat):.2f}** times those of plain decoding "
        "(Theorem 3.11).",
        f"Best γ: **{_length(best)}** with v and o ({at.gain(best):.2f}×), {_length(plain_best)} by Theorem 3.8 "
        f"({walltime_improvement(at.alpha, plain_best, at.c):.2f}×). {_thumb(at)}",
    ]
    if can_improve(at.alpha, at.c):
        lines.append(
            f"α is above c, so by Corollary 3.9 the right γ gives at least (1 + α) / (1 + c) = "
            f"{least_improvement(at.alpha, at.c):.2f}× where v = 1 and o = 0."
        )
    else:
        lines.append("α is not above c: no γ makes this faster (Corollary 3.9). Decode plainly.")
    return "\n".join(f"- {line}" for line in lines)


def _length(gamma: int) -> str:
    return "none, decode plainly" if not gamma else f"{gamma} or more" if gamma == LONGEST else str(gamma)


def _thumb(at: Settings) -> str:
    if not at.c:
        return "The rule of thumb √(1/c − 1) has no answer where drafting is free."
    return f"The rule of thumb √(1/c − 1) says {thumb_gamma(at.c):.1f}: it does not know α."
