"""Checks that bound the time and memory which untrusted tokenizer files can use."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdemo.core.errors import UserError, plain_text
from specdemo.models.untrusted import model_errors, read_settings, walk
from specdemo.models.zoo import SAMPLE_TEXT

if TYPE_CHECKING:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

_MAX_GROWTH, _MAX_PREFIX = 32, 64
_MAX_PATTERN = 10_000
_MAX_CHOICES, _FEW = 4_096, 16
_MAX_ADDED_TOKENS = 100_000
_TEXT_RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_GROUP = re.compile(r"\?(?::|>|=|!|<=|<!|[ims-]+[:)]|<\w+>)")
_QUANTIFIER = re.compile(r"([*+?])[?+]?|\{(\d*)(,?)(\d*)\}\??")
_EXPONENTIAL = 99


def check_tokenizer(name: str, folder: Path) -> None:
    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json", folder / "added_tokens.json"):
        if path.exists():
            read_settings(name, path)
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    stored = read_settings(name, path)
    try:
        if isinstance(stored.get("model"), dict) and stored["model"].get("dropout"):
            raise ValueError("it splits the same text differently each time")
        if len(stored.get("added_tokens") or ()) > _MAX_ADDED_TOKENS:
            raise ValueError(f"it adds more than {_MAX_ADDED_TOKENS:,} tokens")
        for rules in _TEXT_RULES:
            _check_rules([value for _, value in walk({"": stored.get(rules)}) if isinstance(value, dict)])
    except (ValueError, TypeError, AttributeError) as error:
        reason = plain_text(str(error), 150)
        raise UserError(f"the tokenizer of {name} is refused ({reason}): choose another model") from None


def open_tokenizer(
    name: str, folder: Path, kind: type[PreTrainedTokenizerBase] | type[AutoTokenizer]
) -> PreTrainedTokenizerBase:
    check_tokenizer(name, folder)
    with model_errors(f"the tokenizer of {name}", folder=folder):
        tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
        tokenizer.decode(tokenizer.encode(SAMPLE_TEXT))
        return tokenizer


def _check_rules(rules: list[Mapping[str, Any]]) -> None:
    growth = 1.0
    for rule in rules:
        if isinstance(pattern := rule.get("Regex"), str):
            check_pattern(pattern)
        if len(str(rule.get("prepend") or "")) > _MAX_PREFIX:
            raise ValueError("it adds a long text")
        if isinstance(encoded := rule.get("precompiled_charsmap"), str):
            growth *= _longest_replacement(encoded)
        growth *= _replacement_growth(rule)
    if growth > _MAX_GROWTH:
        raise ValueError("its rules multiply the length of the text")


def _replacement_growth(rule: Mapping[str, Any]) -> float:
    if rule.get("type") == "TemplateProcessing":
        single = rule.get("single") or ()
        return max(1, sum("Sequence" in piece for piece in single), len(single) / _MAX_PREFIX)
    if rule.get("type") != "Replace":
        return 1
    pattern, added = rule.get("pattern") or {}, len(rule.get("content") or "")
    return max(1, added / max(1, len(pattern.get("String", " ")))) + ("Regex" in pattern and added > 1)


def _longest_replacement(encoded: str) -> float:
    table = base64.b64decode(encoded)
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, max(map(len, texts.split(b"\0"))) / 64)


@dataclass(frozen=True)
class _Cost:
    """Backtracking: about `choices` times the text length to the power of `degree`."""

    degree: int = 0
    end: int = 0  # degree if the following text cannot fail
    choices: int = 1
    simple: bool = True
    optional: bool = False
    size: int = 1


def check_pattern(pattern: str) -> None:
    """Raise `ValueError` for searches of more than quadratic time."""
    shown = f"the pattern {plain_text(pattern, 40)}"
    if len(pattern) > _MAX_PATTERN:
        raise ValueError(f"{shown} is too long")
    try:
        cost = _PatternReader(pattern).read()
    except (IndexError, RecursionError):
        raise ValueError(f"{shown} has unknown syntax") from None
    if cost.end > 1 or cost.choices > _MAX_CHOICES or cost.size > _MAX_PATTERN:
        raise ValueError(f"{shown} backtracks too much")


class _PatternReader:
    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0

    def read(self) -> _Cost:
        cost = self._alternatives()
        if self._at < len(self._text):
            raise IndexError
        return cost

    def _alternatives(self) -> _Cost:
        costs = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            costs.append(self._sequence())
        return _Cost(
            max(cost.degree for cost in costs),
            max(cost.end for cost in costs),
            sum(cost.choices for cost in costs),
            len(costs) == 1 and costs[0].simple,
            any(cost.optional for cost in costs),
            sum(cost.size for cost in costs),
        )

    def _sequence(self) -> _Cost:
        parts: list[_Cost] = []
        while self._peek() not in ("|", ")", ""):
            parts.append(self._repeated())
        required = max((i for i, part in enumerate(parts) if not part.optional), default=0)
        before, ends = sum(part.degree for part in parts[:required]), [part.end for part in parts[required:]]
        return _Cost(
            sum(part.degree for part in parts),
            max([before + ends[0], *ends[1:]]) if ends else 0,
            prod(part.choices for part in parts),
            all(part.simple for part in parts),
            all(part.optional for part in parts),
            sum(part.size for part in parts),
        )

    def _repeated(self) -> _Cost:
        cost = self._atom()
        while (match := _QUANTIFIER.match(self._text, self._at)) and match.group() not in ("{}", "{,}"):
            self._at = match.end()
            sign, low, comma, high = match.groups()
            least = int(low or 0) if sign is None else sign == "+"
            most = int(high or low) if sign is None and (high or not comma) else 1 if sign == "?" else inf
            many = most - least > _FEW
            nested = most > 1 and not cost.simple
            cost = _Cost(
                _EXPONENTIAL if nested else cost.degree + many,
                cost.degree if nested else cost.end,
                cost.choices * (1 if many else 1 + int(most - least)),
                cost.simple and most == least,
                cost.optional or least == 0,
                cost.size * max(1, least),
            )
        return cost

    def _atom(self) -> _Cost:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            self._class()
        elif character == "\\":
            self._escape()
        return _Cost()

    def _group(self) -> _Cost:
        kind = _GROUP.match(self._text, self._at)
        if self._peek() == "?" and kind is None:
            raise IndexError
        sign = kind.group() if kind else ""
        self._at += len(sign)
        if sign.endswith(")"):  # the group contains only options
            if self._at > len(sign) + 1:
                raise IndexError
            return _Cost()
        cost = self._alternatives()
        if self._next() != ")":
            raise IndexError
        if sign in ("?>", "?=", "?!", "?<=", "?<!"):  # the group is never entered again
            return replace(cost, degree=cost.end, optional=False)
        return cost

    def _class(self) -> None:
        if self._peek() == "^":
            self._at += 1
        if self._peek() == "]":
            raise IndexError  # engines differ
        while (character := self._next()) != "]":
            if character == "[":
                self._class()
            elif character == "\\":
                self._at += 1

    def _escape(self) -> None:
        kind = self._next()
        if kind in "123456789kgX":
            raise IndexError
        if kind in "pPx" and self._peek() == "{":
            while self._next() != "}":
                pass

    def _next(self) -> str:
        self._at += 1
        return self._text[self._at - 1]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]
