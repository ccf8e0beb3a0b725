"""Schema of options: table of fields, sentences of refused values, and checks of several fields."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from specdemo.core.errors import UserError
from specdemo.core.options import Option, OptionSet, option, options

CHECKED: list[tuple[str, Any]] = []


def base_check(chosen: Any) -> None:
    CHECKED.append(("base", chosen.count))


def own_check(chosen: Any) -> None:
    CHECKED.append(("own", chosen.count))
    if chosen.count == 5:
        raise UserError("count must not be 5")


def named_check(chosen: Any, names: Iterable[str]) -> None:
    CHECKED.append(("named", sorted(names)))


@options("Sizes", checks=(base_check,))
class Sizes(OptionSet):
    """Options of a base class."""

    count: int = option(3, "Count of X", bounds=(1, 9), hint=" (0: none)", metavar="N")
    share: float | None = option(None, "Share", "a share", bounds=(0.5, 2.5))


@options("Names", checks=(own_check,), check_named=named_check)
class Names(Sizes):
    """Options of a derived class."""

    kind: str = option("a", "Kind", choices={"a": "first", "b": SimpleNamespace(title="second")}, noun="kind of name")
    also: str | None = option(None, "Also", choices={"c": "third"}, group="Others", flag="--and")
    kinds: tuple[str, ...] = option((), "Kinds", choices={"x": "1", "y": "2"})
    numbers: tuple[int, ...] = option((), "Numbers")
    all_rates: tuple[float, ...] = option((), "Rates")
    on: bool = option(False, "On")
    text: str = option("", "Text")
    plain: int = 7
    nested: Sizes | None = None


@options()
class More(Names):
    """Options of a third class, in no group."""

    more: float = option(0.5, "M")


def refusal(*args: Any, kind_of_options: type[Names] = Names, **values: Any) -> str:
    with pytest.raises(UserError) as refused:
        kind_of_options(*args, **values)
    return str(refused.value)


def test_the_table_describes_fields_of_all_classes() -> None:
    assert [*Names.OPTIONS] == ["count", "share", "kind", "also", "kinds", "numbers", "all_rates", "on", "text"]
    count = Names.OPTIONS["count"]
    assert count is Sizes.OPTIONS["count"]
    assert count == Option(
        3, "Count of X", "count of X", (1, 9), hint=" (0: none)", group="Sizes", flag="--count", metavar="N",
        name="count", type=int,
    )  # fmt: skip
    share = Names.OPTIONS["share"]
    assert (share.type, share.help, share.range, share.many, share.item_type) == (
        *(float, "a share", "from 0.5 to 2.5", False, float),
    )
    also = Names.OPTIONS["also"]
    assert (also.type, also.group, also.flag, also.range, also.titles()) == (str, "Others", "--and", "", {"c": "third"})
    kind = Names.OPTIONS["kind"]
    assert (kind.group, kind.flag, kind.titles()) == ("Names", "--kind", {"a": "first", "b": "second"})
    rates = Names.OPTIONS["all_rates"]
    assert (rates.flag, rates.element) == ("--all-rates", "all-rates")
    numbers = Names.OPTIONS["numbers"]
    more = More.OPTIONS["more"]
    assert (more.group, more.help, More.OPTIONS["kind"].group) == ("", "m", "Names")
    assert numbers.many and numbers.item_type is int and numbers.type == tuple[int, ...] and numbers.titles() == {}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"count": 0}, "count must be from 1 to 9, not 0 (0: none)"),
        ({"count": 10}, "count must be from 1 to 9, not 10"),
        ({"count": 2.5}, "count must be a whole number, not 2.5"),
        *(({"count": value}, f"count must be a whole number, not {value}") for value in (1.0, 9.0)),
        ({"count": 99.5}, "count must be from 1 to 9, not 99.5"),
        ({"count": "2"}, "count must be a number, not '2'"),
        ({"count": True}, "count must be a number, not True"),
        ({"count": None}, "count must be a number, not empty"),
        ({"count": 10**5000}, "count must be from 1 to 9, not a number with thousands of digits"),
        ({"share": 0.25}, "share must be from 0.5 to 2.5, not 0.25"),
        ({"share": math.nan}, "share must be from 0.5 to 2.5, not nan"),
        ({"share": "x" * 600}, f"share must be a number, not '{'x' * 499}"),
        ({"kind": 1}, "kind must be a name, not 1"),
        ({"kind": math.nan}, "kind must be a name, not nan"),
        ({"on": 1}, "on must be true or false, not 1"),
        ({"on": -math.inf}, "on must be true or false, not -inf"),
        ({"numbers": 3}, "numbers must be a list of whole numbers, not 3"),
        ({"numbers": (1, math.nan)}, "numbers must be a list of whole numbers, not nan"),
        ({"all_rates": 3}, "all_rates must be a list, not 3"),
        ({"kinds": 3}, "kinds must be a list of names, not 3"),
        ({"plain": "x"}, "plain must be a valid object, not 'x'"),
        ({"nested": 5}, "nested must be a Sizes, not 5"),
        *(({"kind": name}, f"unknown kind of name {name!r}: known are a, b") for name in ("c", "ab", "")),
        ({"also": "d"}, "unknown also 'd': known are c"),
        ({"kinds": ("x", "z")}, "unknown kinds 'z': known are x, y"),
        ({"text": "a\ud800"}, "text has an invalid character at position 2: remove it"),
        ({"kinds": ("x", "\ud800")}, "kinds has an invalid character at position 1: remove it"),
        (
            {"other": 1},
            "unknown option 'other': known are count, share, kind, also, kinds, numbers, all_rates, on, text",
        ),
        ({"count": 5}, "count must not be 5"),
    ],
)
def test_refused_values_are_named_with_their_limits(values: dict[str, Any], sentence: str) -> None:
    assert refusal(**values) == sentence


def test_positional_values_are_named_by_their_fields() -> None:
    assert refusal("x") == "count must be a number, not 'x'" and refusal(1, 9) == "share must be from 0.5 to 2.5, not 9"
    named = (1, 0.5, "a", None, (), (), (), False, "", 7, None)
    assert refusal(*named, "x", kind_of_options=More) == "more must be a number, not 'x'"
    known = "count, share, kind, also, kinds, numbers, all_rates, on, text"
    assert refusal(*named, 8) == f"unknown option 11: known are {known}"


@pytest.mark.parametrize("name", ["kinds", "numbers", "all_rates"])
def test_validation_ends_at_the_first_invalid_item(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} must be") as refused:
        Names(**{name: ({},) * 2000})
    cause = refused.value.__context__
    assert isinstance(cause, ValidationError) and cause.error_count() == 1


def test_values_at_the_limits_are_valid() -> None:
    for values in ({"count": 1}, {"count": 9}, {"share": 0.5}, {"share": 2.5}, {"share": None}, {"also": None}):
        assert vars(Names(**values)) | values == vars(Names(**values))
    chosen = Names(kind="b", also="c", kinds=("y", "x"), numbers=(1, -2), on=True, text="é")
    assert (chosen.kind, chosen.also, chosen.kinds, chosen.numbers) == ("b", "c", ("y", "x"), (1, -2))
    with pytest.raises(AttributeError):
        chosen.kind = "a"  # type: ignore[misc]
    assert Names(also="").also == ""  # like None


def test_checks_run_in_order_of_the_classes() -> None:
    CHECKED.clear()
    Names(count=4)
    assert CHECKED == [("base", 4), ("own", 4), ("named", ["count"])]
    CHECKED.clear()
    complete = {name: getattr(Names(), name) for name in (*Names.OPTIONS, "plain", "nested")}
    CHECKED.clear()
    Names(**complete)  # all fields are named, as in `dataclasses.replace`
    assert CHECKED == [("base", 3), ("own", 3)]
    for kind, names in ((Sizes, ["base"]), (More, ["base", "own"])):
        CHECKED.clear()
        kind()
        assert CHECKED == [(name, 3) for name in names]
