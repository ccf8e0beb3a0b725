"""Rules about words: numbers, amounts, months, names and rare words of a drafted text."""

from __future__ import annotations

import builtins
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.generate import generate
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig
from specdemo.remote.word_rules import AlwaysVerify, document_frequency, word_counts, word_rules

FREQUENCY = document_frequency(["Common word", "common sense", "common rare_one"])


class Letters:
    """Tokenizer with a token per character."""

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


def verified(text: str, gates: tuple[str, ...], before: str = "x ", **more: Any) -> bool:
    names = more.pop("names", None)
    rules = word_rules(Letters(), CloudConfig("http://a:1", gates=gates, **more), names)
    return rules([*map(ord, before)], Draft.chain(tuple(map(ord, text))))


@pytest.mark.parametrize(
    ("rule", "hit", "miss"),
    [
        ("numbers", "in 1999", "in a year"),
        ("amounts", " twelve euros", " some euros"),
        ("amounts", " a hundred and five days", " once upon a time, 99 days"),
        ("months", " in March", " to march in mayhem"),
        ("names", "of Paris", "of paris, 1"),
    ],
)
def test_a_rule_requires_verification(rule: str, hit: str, miss: str) -> None:
    if rule == "amounts":
        pytest.importorskip("text_to_num")
    assert verified(hit, (rule,)) and not verified(miss, (rule,)) and verified(hit, ("months", "numbers", rule))


def test_only_drafted_text_is_tested() -> None:
    assert not verified("of paris", ("numbers", "months"), before="1 May ")


def test_names_are_recognised_by_a_function_of_the_caller() -> None:
    def phones(text: str) -> bool:
        return "iPhone" in text

    assert verified("an iPhone", ("names",), names=phones) and not verified("The end", ("names",), names=phones)
    recipe = Recipe(pair="bundled", cloud=CloudConfig("http://127.0.0.1:1", gates=("rare",)))
    for chosen in (recipe, Recipe(pair="bundled")):
        with pytest.raises(UserError, match="names has no effect without gate names"):
            next(generate(chosen, "x", names=phones))


def test_rarity_is_read_from_a_frequency_list(tmp_path: Path) -> None:
    assert FREQUENCY == Counter({"common": 3, "word": 1, "sense": 1, "rare": 1, "one": 1})
    assert AlwaysVerify(["rare"], FREQUENCY)("a word") and not AlwaysVerify(["rare"], FREQUENCY)("Common")
    path = tmp_path / "words.txt"
    path.write_text("the 900\nhouse\t40\nHouse 2\ntower,7\n\n", "utf-8")
    assert word_counts(path) == Counter({"the": 900, "house": 42, "tower": 7})
    listed = {"word_frequencies": str(path), "gate_rare": 42}
    assert not verified("the house", ("rare",), **listed) and verified("the tower", ("rare",), **listed)
    assert not verified("the tower", ("rare",), **{**listed, "gate_rare": 7}) and verified("a", ("rare",), **listed)


@pytest.mark.parametrize(
    ("content", "words"), [(b"house\n", "line 1 of"), (b"the 9\nx y z\n", "line 2 of"), (b"\xff 1", "no readable list")]
)
def test_a_wrong_list_gets_a_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        word_counts(path)
    with pytest.raises(UserError, match="no readable list"):
        word_counts(tmp_path / "missing.txt")


def test_amounts_name_their_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "text_to_num":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install text2num"):
        word_rules(Letters(), CloudConfig("http://a:1", gates=("amounts",)))
