"""Patterns of tokenizers: those in use are accepted, those that backtrack exponentially are refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from fakes.tiny_models import byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import Regex, pre_tokenizers

from specdemo.core.errors import UserError
from specdemo.models.tokenizer_check import check_pattern, check_tokenizer

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
USED = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3": CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Qwen": CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    rf"{CONTRACTION}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s+",
    "DeepSeek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "Falcon": r"[0-9][0-9][0-9]",
    "groups of digits": r"\d{1,3}(?=(?:\d{3})*\b)",
    "CLIP": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "T5": r" {2,}",
    "options": r"(?i)'s|\p{L}+",
}
REFUSED = (
    r"(a+)+$",
    r"(?:a|a)+b",
    r"(?:(?:a|a){22}b)",
    r"(a*)*b",
    r"a*a*b",
    r"\s*\s*\s*x",
    r"(?:a{1,9}){1,9}b",
    "a?" * 22 + "a" * 22,
    r"(?=.*a)(?=.*b)c",
    r"(?:a{1000}){1000}",
    r"(.)\1",
    r"(?<x>a)\k<x>",
    r"(?(1)a|b)",
    r"(?~abc)",
    r"x(?i)a|b",
    r"[]a*]",
    r"[a",
    r"\p{L",
    r"(a",
    r"a)",
    "(" * 3000,
    "a" * 20_000,
)


@pytest.mark.parametrize("name", USED)
def test_patterns_in_use_are_accepted(name: str) -> None:
    check_pattern(USED[name])
    pre_tokenizers.Split(Regex(USED[name]), "isolated").pre_tokenize_str("Hello  world, 1234 naïve\n\n")


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:20])
def test_backtracking_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="backtracks too much|unknown syntax|too long"):
        check_pattern(pattern)


@pytest.mark.parametrize("text", ["a" * 3000, " " * 3000, "\n" * 3000, "aA" * 1500, "1" * 3000])
def test_accepted_patterns_split_long_texts(text: str) -> None:
    for pattern in USED.values():
        pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text + "\u0301x")


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), sentencepiece_tokenizer()])
def test_ordinary_tokenizers_are_accepted(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    check_tokenizer("model", tmp_path)


@pytest.mark.parametrize(("length", "accepted"), [(33, True), (100_000, False)])
def test_normalization_tables_with_long_replacements_are_refused(length: int, accepted: bool, tmp_path: Path) -> None:
    table = (4).to_bytes(4, "little") + bytes(4) + b"a\0" + b"b" * length + b"\0"
    rule = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": rule}))
    if accepted:
        check_tokenizer("model", tmp_path)
    else:
        with pytest.raises(UserError, match="multiply the length"):
            check_tokenizer("model", tmp_path)
