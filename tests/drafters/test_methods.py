"""Shapes and options of methods, and texts that drafters read."""

from __future__ import annotations

import pytest

from specdemo.core.errors import UserError
from specdemo.drafters import METHODS, draft_shape, option_classes
from specdemo.drafters.model import readable

VOCAB, OWN = 12, 9


def test_shapes_and_options_of_methods() -> None:
    assert {name for name in METHODS if draft_shape(name) == "forest"} == {"tree", "lookahead", "beam"}
    assert draft_shape("of another version") == "chain"
    groups = option_classes()
    assert len(groups) == len(set(groups)) and {group for method in METHODS.values() for group in method.options} == {
        *groups
    }
    assert METHODS["nasd"].option_names == (
        *("ngram", "filler_top_k", "filler_weight", "ngram_levels", "ngram_random", "ngram_keep"),
    )
    with pytest.raises(UserError) as refused:
        METHODS["nasd"].options[0](filler_weight="equal", filler_top_k=1)
    sentence = "filler_weight equal has no effect with filler_top_k 1: choose 2 or more, or weight rank"
    assert str(refused.value) == sentence
    assert METHODS["nasd"].options[0](filler_weight="equal", filler_top_k=2)
    assert METHODS["nasd"].options[0](filler_weight="rank", filler_top_k=1)
    with pytest.raises(UserError) as refused:
        METHODS["self"].options[0](exit_layer=1, skip_layers=(1,))
    assert str(refused.value) == "give either exit_layer or skip_layers, not both"
    assert METHODS["self"].options[0](exit_layer=1) and METHODS["self"].options[0](skip_layers=(1,))


@pytest.mark.parametrize(
    ("tokens", "own_size", "vocab_size", "expected"),
    [
        ([1, 9], None, 10, True),
        ([1, 9], 10, 10, True),
        ([1, 9], 10, 12, True),
        ([9, 1], 9, 12, False),
        ([1, 9], 9, 9, True),  # texts of a smaller vocabulary
        ([8, 1], 9, 12, True),
    ],
)
def test_drafters_read_texts_of_their_ids(
    tokens: list[int], own_size: int | None, vocab_size: int, expected: bool
) -> None:
    assert readable(tokens, own_size, vocab_size) is expected
