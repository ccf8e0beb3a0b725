"""Figures computed in one place: cost terms, paths that follow a text, and their texts."""

from __future__ import annotations

import random

import pytest

from specdemo.core.formats import format_bytes, latency, megabytes, number, percent
from specdemo.core.step import Draft
from specdemo.core.theory import CostTerms, speedup


def test_cost_terms_give_the_measured_speed_up() -> None:
    """Two tokens per step of 0.3 s, against one per pass of 0.1 s: 2/3 of the speed of AR decoding."""
    terms = CostTerms.of(0.4, 2.2, 0.4, drafted=30, steps=10, pass_s=0.1)
    assert (terms.drafted, terms.draft, terms.v, terms.o) == pytest.approx((3.0, 0.4, 2.2, 0.4))
    assert terms.c == pytest.approx(0.4 / 3)
    assert speedup(2.0, terms.drafted, terms.c, terms.v, terms.o) == pytest.approx(2 * 0.1 / 0.3)
    assert CostTerms.of(0.4, 2.2, 0.4, drafted=0, steps=10, pass_s=0.1).c == 0.0


def test_a_draft_is_followed_as_far_as_the_text_agrees() -> None:
    """Compare with all paths of random forests, in which siblings may have equal tokens."""
    rng = random.Random(3)
    longest = 0
    for _ in range(200):
        parents = [rng.randrange(-1, node) for node in range(rng.randrange(1, 9))]
        draft = Draft(tuple(rng.randrange(3) for _ in parents), tuple(parents))
        text = [rng.randrange(3) for _ in range(5)]
        paths = [tuple(draft.path(node)) for node in range(-1, len(draft))]
        matching = [path for path in paths if [draft.tokens[node] for node in path] == text[: len(path)]]
        assert draft.follow(text) in matching and len(draft.follow(text)) == max(map(len, matching))
        longest = max(longest, len(draft.follow(text)))
    assert longest > 2 and Draft().follow([1]) == ()


def test_texts_of_figures() -> None:
    assert [format_bytes(n) for n in (None, 999, 1e3, 65e6, 123e6, 1.25e9)] == [
        "–", "999 bytes", "1.0 kB", "65.0 MB", "123 MB", "1.2 GB",
    ]  # fmt: skip
    assert [number(x, 1, "-") for x in (None, 2.25)] == ["-", "2.2"] and percent(0.456) == "46 %"
    assert latency(0.0504) == "50 ms" and latency(1.5) == "1.50 s" and megabytes(1_234_567_890) == "1,234.6"
