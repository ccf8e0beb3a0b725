"""Checks that bound the time and memory which untrusted tokenizer files can use.

Rules of supported families are known. Others are tried on each text in a process with limits first.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdemo.core.errors import UserError, plain_text
from specdemo.models.gguf_tokenizer import KNOWN_PATTERNS
from specdemo.models.tokenizer_trial import TOKENIZER_TRIAL
from specdemo.models.untrusted import model_errors, read_settings, walk
from specdemo.models.zoo import SAMPLE_TEXT

if TYPE_CHECKING:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

_MAX_ADDED = 64  # characters, tokens or bytes that a known rule adds
_MAX_ADDED_TOKENS = 100_000
_GROWING = ("ByteLevel", "Precompiled")  # types of rules that multiply the length of a text
_TEXT_RULES = ("normalizer", "pre_tokenizer", "post_processor")
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
    """Mixin of a tokenizer with unknown rules, which tries each text before."""

    trial: Path  # tokenizer.json

    def encode(self, text: str, *args: Any, **options: Any) -> Any:
        try_text(self, text)
        return super().encode(text, *args, **options)  # type: ignore[misc]

    def __call__(self, text: str, *args: Any, **options: Any) -> Any:
        try_text(self, text)
        return super().__call__(text, *args, **options)  # type: ignore[misc]


def try_text(tokenizer: object, text: str) -> None:
    """Raise `UserError` if a tokenizer with unknown rules takes too long for a text."""
    if isinstance(tokenizer, TriedTokenizer):
        _try_file("the tokenizer", tokenizer.trial, text)


def _try_file(subject: str, path: Path, text: str) -> None:
    TOKENIZER_TRIAL.try_file(path, (str(path), text), _SECONDS, subject)


def check_tokenizer(name: str, folder: Path) -> bool:
    """Return True if all rules are known. Raises `UserError` for random rules and unknown rules of the decoder."""
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
        if not _are_known(stored.get("decoder")):
            raise ValueError("it decodes texts by unknown rules")
        return all(_are_known(stored.get(kind)) for kind in _TEXT_RULES)
    except (ValueError, TypeError, AttributeError) as error:
        reason = plain_text(str(error), 150)
        raise UserError(f"the tokenizer of {name} is refused ({reason}): choose another model") from None


def _are_known(stored: Any) -> bool:
    """Return True for rules of supported families, and for others without growth of texts."""
    rules = [value for _, value in walk(stored) if isinstance(value, dict)]
    growing = sum(rule.get("type") in _GROWING for rule in rules)
    return growing <= 1 and all(map(_is_known, rules))


def _is_known(rule: Mapping[str, Any]) -> bool:
    encoded, pattern = rule.get("precompiled_charsmap"), rule.get("pattern") or {}
    if "Regex" in rule and str(rule["Regex"]) not in KNOWN_PATTERNS:
        return False
    if len(str(rule.get("prepend") or "")) > _MAX_ADDED:
        return False
    if isinstance(encoded, str):
        table = base64.b64decode(encoded)
        texts = table[4 + int.from_bytes(table[:4], "little") :]
        if max(map(len, texts.split(b"\0"))) > _MAX_ADDED:
            return False
    if rule.get("type") == "TemplateProcessing":
        single = rule.get("single") or ()
        return len(single) <= _MAX_ADDED and sum("Sequence" in piece for piece in single) <= 1
    return rule.get("type") != "Replace" or len(rule.get("content") or "") <= max(1, len(pattern.get("String", "")))
