"""Checks that bound the time and memory which untrusted tokenizer files can use.

Regular expressions of supported families are known. Others are tried on each text in a process with limits first.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdemo.core.errors import UserError, plain_text
from specdemo.models.gguf_tokenizer import KNOWN_PATTERNS
from specdemo.models.tokenizer_trial import TOKENIZER_TRIAL
from specdemo.models.untrusted import model_errors, read_settings, walk
from specdemo.models.zoo import SAMPLE_TEXT

if TYPE_CHECKING:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

_MAX_GROWTH, _MAX_PREFIX = 32, 64
_MAX_ADDED_TOKENS = 100_000
_TEXT_RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_SECONDS = 30.0


def open_tokenizer(
    name: str, folder: Path, kind: type[PreTrainedTokenizerBase] | type[AutoTokenizer]
) -> PreTrainedTokenizerBase:
    path = folder / "tokenizer.json"
    is_known = check_tokenizer(name, folder)
    if not is_known:
        _try_file(f"the tokenizer of {name}", path, SAMPLE_TEXT)
    with model_errors(f"the tokenizer of {name}", folder=folder):
        tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
        tokenizer.decode(tokenizer.encode(SAMPLE_TEXT))
    if not is_known:
        kind = type(tokenizer)
        tokenizer.__class__ = type(kind.__name__, (TriedTokenizer, kind), {"trial": path})
    return tokenizer


class TriedTokenizer:
    """Mixin of a tokenizer with unknown patterns, which tries each text before."""

    trial: Path  # tokenizer.json

    def encode(self, text: str, *args: Any, **options: Any) -> Any:
        try_text(self, text)
        return super().encode(text, *args, **options)  # type: ignore[misc]

    def __call__(self, text: str, *args: Any, **options: Any) -> Any:
        try_text(self, text)
        return super().__call__(text, *args, **options)  # type: ignore[misc]


def try_text(tokenizer: object, text: str) -> None:
    """Raise `UserError` if a tokenizer with unknown patterns takes too long for a text."""
    if isinstance(tokenizer, TriedTokenizer):
        _try_file("the tokenizer", tokenizer.trial, text)


def _try_file(subject: str, path: Path, text: str) -> None:
    """Raise `UserError` if a text cannot be encoded."""
    if problem := _problem(subject, path, path.stat().st_mtime_ns, text):
        raise UserError(problem)


@lru_cache(maxsize=16)  # prompts are encoded several times
def _problem(subject: str, path: Path, changed: int, text: str) -> str:
    return TOKENIZER_TRIAL.problem([str(path), text], _SECONDS, subject, "choose another model")


def check_tokenizer(name: str, folder: Path) -> bool:
    """Return True if all patterns are known. Raises `UserError` for rules that lengthen texts or are random."""
    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json", folder / "added_tokens.json"):
        if path.exists():
            read_settings(name, path)
    path = folder / "tokenizer.json"
    if not path.exists():
        return True
    stored = read_settings(name, path)
    try:
        if isinstance(stored.get("model"), dict) and stored["model"].get("dropout"):
            raise ValueError("it splits the same text differently each time")
        if len(stored.get("added_tokens") or ()) > _MAX_ADDED_TOKENS:
            raise ValueError(f"it adds more than {_MAX_ADDED_TOKENS:,} tokens")
        groups = {kind: list(_rules(stored.get(kind))) for kind in _TEXT_RULES}
        for rules in groups.values():
            _check_growth(rules)
        if not _are_known(groups["decoder"]):
            raise ValueError("it decodes texts by an unknown pattern")
    except (ValueError, TypeError, AttributeError) as error:
        reason = plain_text(str(error), 150)
        raise UserError(f"the tokenizer of {name} is refused ({reason}): choose another model") from None
    return all(map(_are_known, groups.values()))


def _are_known(rules: Iterable[Mapping[str, Any]]) -> bool:
    return all(str(rule["Regex"]) in KNOWN_PATTERNS for rule in rules if "Regex" in rule)


def _rules(stored: Any) -> Iterator[Mapping[str, Any]]:
    return (value for _, value in walk({"": stored}) if isinstance(value, dict))


def _check_growth(rules: list[Mapping[str, Any]]) -> None:
    growth = 1.0
    for rule in rules:
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
