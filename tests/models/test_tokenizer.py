"""Tokenizers: incremental decoding equals that of the complete list; rules that need too much time are refused."""

import base64
import json
import random
from pathlib import Path

import pytest
from fakes.tiny_models import TEXTS, byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdemo.core.errors import UserError
from specdemo.models.gguf_tokenizer import KNOWN_PATTERNS
from specdemo.models.limited_process import TOKENIZER_TRIAL
from specdemo.models.tokenizer import (
    Bridge,
    TextStream,
    TriedTokenizer,
    check_tokenizer,
    encode_prompt,
    open_tokenizer,
    token_bytes,
)

TOKENIZERS = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}


def whole(tokenizer: PreTrainedTokenizerFast, context: list[int], tokens: list[int]) -> str:
    """Return the text that `tokens` add to `context`."""

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decode(context + tokens)[len(decode(context)) :]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_texts_join_up(name: str) -> None:
    """Real text, and random ids, which make bytes that are no text at all, special tokens included."""
    tokenizer = TOKENIZERS[name]()
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    text = "".join(TEXTS) + f" trailing  spaces \n\n\t tabs, emoji {family} and e\u0301"
    real = tokenizer.encode(text, add_special_tokens=False)
    cases = [(real[:cut], real[cut:], True) for cut in (0, 1, 7, len(real) // 2)]
    special = [tokenizer.eos_token_id] * 9
    word = tokenizer.encode("return", add_special_tokens=False)
    rng = random.Random(0)
    for _ in range(20):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(60)]
        tokens[30:30] = special
        cases += [(context, tokens, False) for context in ([], tokens[:20] + word, tokens[:20] + word + special)]
    for context, tokens, is_text in cases:
        stream = TextStream(tokenizer, context)
        pieces = [stream.push(token) for token in tokens]
        assert "".join(pieces) + stream.flush() == whole(tokenizer, context, tokens)
        assert not is_text or ("\ufffd" not in "".join(pieces) and "" in pieces)


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


def with_tokens(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> PreTrainedTokenizerFast:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in tokens:
        state["model"]["vocab"][token] = len(state["model"]["vocab"])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))


def test_bytes_of_unusual_tokens() -> None:
    unusual = with_tokens(byte_level_tokenizer(), "\u6771", "<0xZZ>")
    assert token_bytes(unusual)[-2:] == ["\u6771".encode(), b"<0xZZ>"]
    assert token_bytes(with_tokens(sentencepiece_tokenizer(), "<0xZZ>"))[-1] == b"<0xZZ>"


# --- rules of untrusted tokenizers ---

FAMILIES = (  # GPT-2 and Llama 3
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
)
LONG = ("Hello  world, 1234 naïve\n\n", "a" * 3000, " " * 3000, "\n" * 3000, "aA" * 1500, "1" * 3000, ".\n" * 1500)


def split_by(pattern: str, folder: Path) -> PreTrainedTokenizerBase:
    byte_level_tokenizer().save_pretrained(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    stored["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, stored["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return open_tokenizer("model", folder, PreTrainedTokenizerFast)


def test_known_patterns_split_long_texts(tmp_path: Path) -> None:
    for pattern in KNOWN_PATTERNS:
        for text in LONG:
            pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text + "\u0301x")

    for pattern in FAMILIES:
        assert not isinstance(split_by(pattern, tmp_path), TriedTokenizer)


@pytest.mark.slow
def test_tokenizers_with_other_patterns_are_tried_on_each_text(tmp_path: Path) -> None:
    tokenizer = split_by(r"\d{1,3}(?=(?:\d{3})*\b)|a*a*a*b|(d+)+$", tmp_path)
    expected = byte_level_tokenizer().encode("def f(x): return x", add_special_tokens=False)
    assert encode_prompt(tokenizer, "def f(x): return x", False, 300)[-len(expected) :] == expected
    assert Bridge(tokenizer, tokenizer, []).read(expected) == expected
    until_the_limit, retried = "a" * 20_000 + "cb", "d" * 40 + "c"
    for encode in (tokenizer, tokenizer.encode, lambda text: encode_prompt(tokenizer, text, True, 300, list)):
        with pytest.raises(UserError, match="the tokenizer .*: choose another model"):
            encode(retried)
    with pytest.raises(UserError, match="too much time"):
        tokenizer.encode(until_the_limit)
    with pytest.MonkeyPatch.context() as patch:  # each text is tried once
        patch.setattr(TOKENIZER_TRIAL, "request", lambda *request: pytest.fail(str(request)))
        tokenizer.encode("def f(x): return x", add_special_tokens=False)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["[a", "(" * 3000], ids=["open", "nested"])
def test_patterns_that_fail_on_a_sample_are_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the tokenizer of model .*: choose another model"):
        split_by(pattern, tmp_path)


def is_known(folder: Path, **rules: object) -> bool:
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return check_tokenizer("model", folder)


def test_patterns_of_decoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="decodes texts by unknown rules"):
        is_known(tmp_path, decoder={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""})


def test_rules_that_lengthen_texts_are_unknown(tmp_path: Path) -> None:
    for length in (33, 100_000):
        table = (4).to_bytes(4, "little") + bytes(4) + b"a\0" + b"b" * length + b"\0"
        rule = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
        assert is_known(tmp_path, normalizer=rule) is (length == 33)
    rule = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    for count in (1, 8):
        rules = {"type": "Sequence", "pretokenizers": [rule] * count}
        assert is_known(tmp_path, pre_tokenizer=rules) is (count == 1)
