"""Incremental detokenization equals decoding the complete list."""

from __future__ import annotations

import json
import random

import pytest
from fakes.tiny_models import TEXTS, byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from specdemo.core.errors import UserError
from specdemo.models.tokenizer import TextStream, check_vocabulary, token_bytes

TOKENIZERS = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}


def whole(tokenizer: PreTrainedTokenizerFast, context: list[int], tokens: list[int]) -> str:
    """Return the text that `tokens` add to `context`."""

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decode(context + tokens)[len(decode(context)) :]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_real_text_join_up(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = (
        "".join(TEXTS) + " trailing  spaces \n\n\t tabs, emoji \U0001f468\u200d\U0001f469\u200d\U0001f467 and e\u0301"
    )
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for cut in (0, 1, 7, len(tokens) // 2):
        context, rest = tokens[:cut], tokens[cut:]
        stream = TextStream(tokenizer, context)
        pieces = [stream.push(token) for token in rest]
        assert "".join(pieces) + stream.rest() == whole(tokenizer, context, rest)
        assert "\ufffd" not in "".join(pieces) and "" in pieces


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_random_tokens_join_up(name: str) -> None:
    """Random ids make bytes that are no text at all, special tokens included; prompts end as text does."""
    tokenizer = TOKENIZERS[name]()
    special = [tokenizer.eos_token_id] * 9
    word = tokenizer.encode("return", add_special_tokens=False)
    for seed in range(60):
        rng = random.Random(seed)
        tokens = [rng.randrange(len(tokenizer)) for _ in range(60)]
        tokens[30:30] = special
        for context in ([], tokens[:20] + word, tokens[:20] + word + special):
            stream = TextStream(tokenizer, context)
            pieces = [stream.push(token) for token in tokens]
            assert "".join(pieces) + stream.rest() == whole(tokenizer, context, tokens)


def test_characters_are_emitted_with_their_last_byte() -> None:
    tokenizer = byte_level_tokenizer()
    tokens = tokenizer.encode("x\U0001f642y", add_special_tokens=False)
    assert len(tokens) == 6
    stream = TextStream(tokenizer, [])
    assert [stream.push(token) for token in tokens] == ["x", "", "", "", "\U0001f642", "y"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_drafts_are_spelled_in_the_context_they_were_proposed_in(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    context = tokenizer.encode("def add(a, b):\n", add_special_tokens=False)
    one, two = (tokenizer.encode(text, add_special_tokens=False) for text in ("    return a", "    pass"))
    stream = TextStream(tokenizer, context)
    parents = [-1, *range(len(one) - 1), -1, *range(len(one), len(one) + len(two) - 1)]
    pieces = stream.peek([*one, *two], parents)
    assert "".join(pieces[: len(one)]) == whole(tokenizer, context, one)
    assert "".join(pieces[len(one) :]) == whole(tokenizer, context, two)
    assert stream.push(two[0]) == pieces[len(one)]  # peeking does not change the stream


def test_bytes_of_unusual_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"] |= {"\u6771": 300, "<0xZZ>": 301}
    unusual = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    assert token_bytes(unusual)[300:] == ["\u6771".encode(), b"<0xZZ>"]
    state = json.loads(sentencepiece_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"]["<0xZZ>"] = len(state["model"]["vocab"])
    unusual = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    assert token_bytes(unusual)[-1] == b"<0xZZ>"


def test_vocabularies_beyond_the_model_are_refused() -> None:
    check_vocabulary("the target", byte_level_tokenizer(), 300)
    with pytest.raises(UserError, match="more than the 299 ids"):
        check_vocabulary("the target", byte_level_tokenizer(), 299)
