"""Property-based tests: a few fixed examples in `make test`, or, with `FUZZ_SECONDS`, those of successive seeds."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

SECONDS, SEED = "FUZZ_SECONDS", "FUZZ_SEED"  # environment variables: duration of the run, and first seed
EXAMPLES = 200  # per seed
share_s = 0.0  # of each property

SPECIAL = (None, True, False, 0, -1, 1, 1 << 31, -(1 << 63), 1 << 64, 10**30, 0.5, -0.0, 1e308, 1e-320, float("nan"))
SPECIAL += (
    float("inf"),
    "",
    "\x00",
    "\ud800",
    "\u202e",
    "<b>",
    "1",
    "a" * 500,
    "0" * 70,
    b"",
    b"\xff" * 5,
    [],
    {},
    [[]],
)
json_values = st.recursive(
    st.sampled_from(SPECIAL) | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def holds_for(examples: int = 25, **values: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Decorate a property of `values`; `make fuzz` prints the seed of a counterexample."""

    def decorate(check: Callable[..., None]) -> Any:
        property_test = given(**values)(check)
        fixed = settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            suppress_health_check=[*HealthCheck],
        )
        if SECONDS not in os.environ:
            return pytest.mark.fuzz(fixed(property_test))
        longer = settings(fixed, max_examples=EXAMPLES, derandomize=False)(property_test)

        def fuzz() -> None:
            end = time.monotonic() + share_s
            for number in count(first_seed()):
                try:
                    seed(number)(longer)()
                except BaseException as error:
                    error.add_note(f"{SEED}={number}")
                    raise
                if time.monotonic() >= end:
                    return

        fuzz.__doc__ = check.__doc__
        return pytest.mark.fuzz(fuzz)

    return decorate


def duration_s() -> float:
    return float(os.environ.get(SECONDS, "0"))


def first_seed() -> int:
    return int(os.environ.get(SEED, "1"))


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside of `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths(inner, (*path, key))


@st.composite
def changed(draw: st.DrawFn, value: Any, others: st.SearchStrategy[Any] = json_values, most: int = 2) -> Any:
    """Return a copy of a JSON value in which up to `most` inner values are replaced, removed, repeated or moved."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(0, most))):
        places = list(paths(value))
        if not places:
            return draw(others)
        *outer, key = draw(st.sampled_from(places))
        parent = value
        for step in outer:
            parent = parent[step]
        match draw(st.sampled_from(("replace", "remove", "repeat", "move"))):
            case "remove":
                del parent[key]
            case "repeat" if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(parent[key]))
            case "move":
                *_, other = draw(st.sampled_from(places))
                if isinstance(parent, dict) == isinstance(other, str):
                    parent.update({other: parent[key]}) if isinstance(parent, dict) else parent.append(parent[key])
            case _:
                parent[key] = draw(others)
    return value
