"""Schema of options: source of flags, controls, API, host limits and documentation."""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from specdemo.core.errors import UserError, check_name, check_unicode

_CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_SHOWN_CHARACTERS = 500  # length of a value in an error message


@dataclass(frozen=True)
class Option:
    """Label, limits and presentation of an option."""

    default: Any
    label: str
    help: str = ""
    bounds: tuple[float, float] | None = None
    slider: tuple[float, float, float] | None = None  # lowest, highest, step; a number field if None
    step: float = 1  # increment of a number field
    choices: Mapping[str, Any] | None = None  # valid name -> title or object with a `title`
    removed: Mapping[str, str] | None = None  # choice of an earlier version -> remedy
    noun: str = ""  # name of a choice in error messages
    hint: str = ""  # appended to errors of values below the range
    group: str = ""
    basic: bool = False  # visible without opening a group
    lossy: bool = False  # changes the distribution of the text unless off
    limit: str = ""  # field of `HostLimits` that bounds the value
    host: bool = False  # fixed on a public page
    terminal: bool = True  # has a flag
    applies: str = ""  # attribute of methods for which this option has an effect
    policies: tuple[str, ...] = ()  # policies that use the option; empty for all
    flag: str = ""
    metavar: str | None = None
    name: str = ""
    type: Any = None  # bool, int, float, str or a tuple type

    @property
    def element(self) -> str:
        return self.name.replace("_", "-")

    @property
    def many(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def item_type(self) -> Any:
        return typing.get_args(self.type)[0] if self.many else self.type

    @property
    def range(self) -> str:
        if self.bounds is None:
            return ""
        return "from {} to {}".format(*self.bounds)

    def titles(self) -> dict[str, str]:
        known = (self.choices or {}).items()
        return {name: value if isinstance(value, str) else value.title for name, value in known}


@dataclass(frozen=True)
class OptionRule:
    """Values that are refused, with cause and remedy.

    `broken(chosen, name)` receives all options and the name of one of `names`. Texts are formatted with `name`, its
    `value`, all options as `chosen`, and `choices`.
    """

    names: tuple[str, ...]  # options at fault; empty for any
    broken: Callable[[Any, str], object]
    cause: str
    remedy: str
    choices: Callable[[Any, str], Iterable[str]] = lambda chosen, name: ()

    def problem(self, chosen: Any, name: str) -> str:
        """Return a sentence with cause and remedy, or an empty text."""
        if not self.broken(chosen, name):
            return ""
        choices = ", ".join(self.choices(chosen, name))
        texts = {"chosen": chosen, "name": name, "value": getattr(chosen, name, None), "choices": choices}
        return f"{self.cause.format(**texts)}: {self.remedy.format(**texts)}"


def problems(
    rules: Iterable[OptionRule], chosen: Any, names: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the first problem of each option, if it is among `names`."""
    reported = set()
    for rule in rules:
        concerned = rule.names or tuple(chosen.OPTIONS)
        for name in concerned if names is None else [name for name in names if name in concerned]:
            if name not in reported and (problem := rule.problem(chosen, name)):
                reported.add(name)
                yield name, problem


def refuse(rules: Iterable[OptionRule], chosen: Any, names: Collection[str] | None = None) -> None:
    """Raise `UserError` for the first problem."""
    for _, problem in problems(rules, chosen, names):
        raise UserError(problem)


class OptionSet:
    """Base class of options, with a table of its fields by name; see `options`."""

    OPTIONS: ClassVar[dict[str, Option]] = {}
    REMOVED: ClassVar[Mapping[str, str]] = {}  # option of an earlier version -> remedy
    RULES: ClassVar[tuple[OptionRule, ...]] = ()


OptionSetT = TypeVar("OptionSetT", bound=OptionSet)


def option(default: Any, label: str, help: str = "", **properties: Any) -> Any:
    """Declare an option as the default of a field; `properties` are further fields of `Option`."""
    declared = Option(default, label, help or label[0].lower() + label[1:], **properties)
    low, high = declared.bounds or (None, None)
    return Field(
        default=default,
        json_schema_extra={"option": typing.cast(Any, declared)},
        ge=low,
        le=high,
        fail_fast=True if isinstance(default, tuple) else None,
    )


@dataclass_transform(frozen_default=True)
def options(
    group: str = "",
    rules: tuple[OptionRule, ...] = (),
    effects: tuple[OptionRule, ...] = (),
    check: Callable[[Any], object] | None = None,
    removed: Mapping[str, str] | None = None,
) -> Callable[[type[OptionSetT]], type[OptionSetT]]:
    """Turn a class of options into a frozen, validated dataclass with a table `OPTIONS` of its fields by name.

    Invalid values raise `UserError`, by `rules` in order, after those of base classes, and by `check`. `effects`
    concern the names of keyword arguments only, unless they are all fields, as in `dataclasses.replace`.
    `removed`: see `OptionSet.REMOVED`.
    """

    def decorate(plain: type[OptionSetT]) -> type[OptionSetT]:
        cls: Any = pydantic_dataclass(frozen=True, config=_CONFIG)(plain)
        cls.OPTIONS = _table(cls, group)
        cls.REMOVED = removed or {}
        cls.RULES = tuple(dict.fromkeys(rule for base in cls.__mro__ for rule in vars(base).get("RULES", ()))) + rules
        construct = cls.__init__

        @wraps(construct)
        def validate(self: Any, *args: Any, **values: Any) -> None:
            try:
                construct(self, *args, **values)
            except ValidationError as error:
                raise UserError(_sentence(error, cls, [*cls.__pydantic_fields__])) from None
            for declared in cls.OPTIONS.values():
                _check_text(declared.name, getattr(self, declared.name))
                _check_names(declared, getattr(self, declared.name))
            refuse(cls.RULES, self)
            if check is not None:
                check(self)
            if len(values) < len(cls.__pydantic_fields__):
                refuse(effects, self, values)

        cls.__init__ = validate
        return typing.cast(type[OptionSetT], cls)

    return decorate


def _table(cls: Any, group: str) -> dict[str, Option]:
    table = {}
    for name, field in cls.__pydantic_fields__.items():
        if not isinstance(field.json_schema_extra, dict):
            continue
        bases = (getattr(base, "OPTIONS", {}) for base in cls.__mro__[1:])
        inherited = next((options[name] for options in bases if name in options), None)
        declared = field.json_schema_extra["option"]
        table[name] = inherited or replace(
            declared,
            name=name,
            type=_value_type(field.annotation),
            group=declared.group or group,
            flag=declared.flag or "--" + name.replace("_", "-"),
        )
    return table


def _check_text(name: str, value: Any) -> None:
    for text in value if isinstance(value, tuple) else [value]:
        if isinstance(text, str):
            check_unicode(name, text)


def _check_names(declared: Option, value: Any) -> None:
    if declared.choices is None or (not value and declared.default is None):
        return
    for name in value if declared.many else [value]:
        if declared.removed and name in declared.removed:
            raise UserError(removal(f"{declared.name} {name}", declared.removed[name]))
        check_name(declared.noun or declared.name, name, declared.choices)


def _value_type(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (None, tuple):
        return annotation
    return next(part for part in typing.get_args(annotation) if part is not type(None))


def removal(name: str, remedy: str) -> str:
    """Return the error message for an option or choice of an earlier version."""
    return f"{name} was removed: {remedy}"


def _sentence(error: ValidationError, options: type[OptionSet], fields: Sequence[str]) -> str:
    problem, table = error.errors()[0], options.OPTIONS
    field, value = problem["loc"][0], problem["input"]
    if field in options.REMOVED:
        return removal(str(field), options.REMOVED[str(field)])
    if problem["type"].startswith("unexpected"):
        return f"unknown option {field!r}: known are {', '.join(table)}"
    name = fields[field] if isinstance(field, int) else field
    if name not in table:
        return f"{name} must be a {problem.get('ctx', {}).get('class_name', 'valid object')}{_not(value)}"
    declared = table[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and declared.bounds and not declared.bounds[0] <= value <= declared.bounds[1]:
        return f"{name} must be {declared.range}{_not(value)}{declared.hint if value < declared.bounds[0] else ''}"
    kind = "a whole number" if number and declared.type is int else _KINDS.get(declared.type, "a list")
    return f"{name} must be {kind}{_not(value)}"


_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a name"}
_KINDS |= {tuple[int, ...]: "a list of whole numbers", tuple[str, ...]: "a list of names"}


def _not(value: Any) -> str:
    try:
        shown = "empty" if value is None else repr(value)
    except ValueError:  # more digits than Python converts to text
        shown = "a number with thousands of digits"
    return f", not {shown[:_SHOWN_CHARACTERS]}"
