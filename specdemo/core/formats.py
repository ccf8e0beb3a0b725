"""Conversion of figures to text; a dash replaces an unknown figure."""

from __future__ import annotations

NOTHING = "–"


def number(x: float | None, digits: int = 2, missing: str = NOTHING) -> str:
    return missing if x is None else f"{x:.{digits}f}"


def rate(x: float | None) -> str:
    """Return tokens per second, with at least three digits."""
    return number(x, 1 if x is None or x >= 10 else 2)


def percent(x: float | None, missing: str = NOTHING, space: str = " ") -> str:
    return missing if x is None else f"{100 * x:.0f}{space}%"


def latency(x: float | None) -> str:
    if x is None:
        return NOTHING
    return f"{x * 1000:.0f} ms" if x < 1 else f"{x:.2f} s"


def kilobytes(n: float | None, digits: int = 1) -> str:
    return NOTHING if n is None else f"{n / 1e3:,.{digits}f}"


def megabytes(n: float | None, digits: int = 1) -> str:
    return NOTHING if n is None else f"{n / 1e6:,.{digits}f}"


def format_bytes(n: float | None) -> str:
    """Return a size with its unit, with a decimal below 100."""
    if n is None:
        return NOTHING
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= factor:
            return f"{n / factor:.{1 if n < 100 * factor else 0}f} {unit}"
    return f"{n:.0f} bytes"
