"""Schema of options: table of fields, sentences of refused values, and checks of several fields."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from specdemo.core.errors import UserError
from specdemo.core.options import OptionSet, option, options

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


def test_the_table_describes_fields_of_all_classes() -> None:
    assert [*Names.OPTIONS] == ["count", "share", "kind", "also", "kinds", "numbers", "all_rates", "on", "text"]
    count, numbers = Names.OPTIONS["count"], Names.OPTIONS["numbers"]
    assert count is Sizes.OPTIONS["count"]
    assert (count.default, count.help, count.bounds, count.group, count.flag) == (
        3,
        "count of X",
        (1, 9),
        "Sizes",
        "--count",
    )
    assert Names.OPTIONS["kind"].titles() == {"a": "first", "b": "second"} and Names.OPTIONS["also"].flag == "--and"
    assert numbers.many and numbers.item_type is int and Names.OPTIONS["all_rates"].flag == "--all-rates"
    assert (More.OPTIONS["more"].group, More.OPTIONS["kind"].group) == ("", "Names")


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"count": 0}, "count .*from 1 to 9, not 0"),
        ({"count": 1.0}, "count .*whole number"),
        ({"count": True}, "count .*number, not True"),
        ({"count": 10**5000}, "count .*thousands of digits"),
        ({"share": math.nan}, "share .*nan"),
        ({"share": "x" * 600}, f"share .*{'x' * 499}"),
        ({"numbers": (1, math.nan)}, "numbers .*whole numbers"),
        ({"kind": ""}, "unknown kind of name ''.*a, b"),
        ({"kinds": ("x", "\ud800")}, "kinds .*invalid character"),
        ({"other": 1}, "unknown option 'other'.*count, share"),
        ({"count": 5}, "count must not be 5"),
    ],
)
def test_refused_values_are_named_with_their_limits(values: dict[str, Any], cause: str) -> None:
    with pytest.raises(UserError, match=cause):
        Names(**values)


def test_positional_values_are_named_by_their_fields() -> None:
    for values, cause in ((("x",), "count .*'x'"), ((1, 9), "share .*9"), ((1, 0.5, "c"), "unknown kind of name 'c'")):
        with pytest.raises(UserError, match=cause):
            Names(*values)


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
