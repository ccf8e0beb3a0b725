"""Rules about words of a draft that require verification (practice guide, section 4.2).

Amounts in words (package `text2num`) and months are English. Rare words have a small count in a frequency list.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.remote.config import CloudConfig

IsName = Callable[[str], bool]  # True for a text that contains a name
_CONTEXT_TOKENS = 8  # tokens that are decoded before a draft
_MAX_FILE_BYTES = 64 << 20
_WORD = re.compile(r"[^\W\d_]+")
_MONTH = re.compile(
    r"\b(January|February|March|April|May|June|July|August|September|October|November|December)\b"
)  # capitalised: march and may are also verbs


def contains_amount(text: str) -> bool:
    """Return True for a number in words. Raises `UserError` without the package."""
    try:
        from text_to_num import alpha2digit
    except ImportError:
        raise UserError("gate amounts needs the package text2num: pip install text2num, or remove the gate") from None
    plain = re.sub(r"\d", " ", text)
    return any(map(str.isdigit, alpha2digit(plain, "en")))


def document_frequency(texts: Iterable[str]) -> Counter[str]:
    return Counter(word for text in texts for word in {word.lower() for word in _WORD.findall(text)})


def word_counts(path: Path) -> Counter[str]:
    """Read lines of a word and its count."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MB: shorten the list of words")
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no readable list of words ({error}): give a UTF-8 file") from error
    counts = Counter[str]()
    for number, line in enumerate(lines, 1):
        word, _, count = line.strip().replace("\t", " ").replace(",", " ").rpartition(" ")
        if line.strip() and not (word and count.isdecimal() and len(count) < 16):
            raise UserError(f"line {number} of {path} is no word and count: write lines such as: house 1234")
        if word:
            counts[word.strip().lower()] += int(count)
    return counts


def word_rules(
    tokenizer: Any, cloud: CloudConfig, is_name: IsName | None = None
) -> Callable[[Sequence[int], Draft], bool]:
    """Return a test of drafts. Raises `UserError`."""
    counts = Counter[str]()
    if "rare" in cloud.always:
        counts = word_counts(Path(cloud.word_frequencies)) if cloud.word_frequencies else _library()
    if "amounts" in cloud.always:
        contains_amount("")  # raise before the run without the package
    tests: dict[str, Callable[[str], bool]] = {
        "numbers": lambda text: any(map(str.isdigit, text)),
        "amounts": contains_amount,
        "months": lambda text: _MONTH.search(text) is not None,
        "names": is_name or (lambda text: any(word[0].isupper() for word in _WORD.findall(text))),
        "rare": lambda text: any(counts[word.lower()] < cloud.gate_rare for word in _WORD.findall(text)),
    }

    def needs_verification(tokens: Sequence[int], draft: Draft) -> bool:
        tail = tokens[-_CONTEXT_TOKENS:]
        before = tokenizer.decode(tail)
        text = tokenizer.decode([*tail, *draft.tokens])[len(before) :]
        return any(tests[rule](text) for rule in cloud.always)

    return needs_verification


@cache
def _library() -> Counter[str]:
    """Count files per word in Python's standard library, the bundled pair's training data."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return document_frequency(path.read_text("utf-8", errors="replace") for path in files)
