"""Property-based tests: a few fixed examples in `make test`, or, with `FUZZ_SECONDS`, those of successive seeds.

Refused values end in a printable sentence with cause and remedy.
"""

import copy
import inspect
import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from specdemo.core.errors import UserError

# Environment variables: duration of the run, first seed, and most seeds
SECONDS, SEED, SEEDS = "FUZZ_SECONDS", "FUZZ_SEED", "FUZZ_SEEDS"
PHASES = [Phase.generate]  # shrinking may take minutes
run_end = property_end = 0.0  # monotonic times

SPECIAL = [None, True, False, 0, -1, 1, 1 << 31, -(1 << 63), 1 << 64, 10**30, 0.5, -0.0, 1e308, 1e-320, math.nan]
SPECIAL += [math.inf, "", "\x00", "\ud800", "\u202e", "<b>", "1", "a" * 500, "0" * 70, b"", b"\xff" * 5, [], {}, [[]]]
json_values = st.recursive(
    st.sampled_from(SPECIAL).map(copy.deepcopy) | st.integers() | st.floats() | st.text(max_size=10),
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
        random_test = settings(fixed, derandomize=False, phases=PHASES)(property_test)

        def fuzz(**fixtures: Any) -> None:
            for number in seeds():
                try:
                    seed(number)(random_test)(**fixtures)
                except BaseException as error:
                    error.add_note(f"{SEED}={number}")
                    raise
                if time.monotonic() >= property_end:
                    return

        parameters = inspect.signature(check).parameters.items()
        own = [parameter for name, parameter in parameters if name not in values]
        fuzz.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        fuzz.__doc__ = check.__doc__
        return pytest.mark.fuzz(fuzz)

    return decorate


def start_property(waiting: int, processes: int) -> None:
    """Give the next property its share of the remaining time; `waiting` properties, including this one, are left."""
    global run_end, property_end
    now = time.monotonic()
    run_end = run_end or now + float(os.environ.get(SECONDS, "0"))
    property_end = now + (run_end - now) * min(1.0, processes / waiting)


def share_s() -> float:
    """Return the remaining seconds of this property; 0 without a time limit of the run."""
    return max(1.0, property_end - time.monotonic()) if SECONDS in os.environ else 0.0


def first_seed() -> int:
    return int(os.environ.get(SEED, "1"))


def seeds() -> Iterator[int]:
    return islice(count(first_seed()), int(os.environ[SEEDS]) if os.environ.get(SEEDS) else None)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
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


def refusal(function: Callable[..., object], *arguments: object) -> str:
    """Return the sentence of the `UserError`, or an empty text if the function returns."""
    try:
        function(*arguments)
    except UserError as error:
        check_sentence(str(error))
        return str(error)
    return ""


def check_sentence(sentence: str) -> None:
    assert sentence.isprintable() and len(sentence) < 450 and ": " in sentence, sentence
