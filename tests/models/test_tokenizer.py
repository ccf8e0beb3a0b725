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
from specdemo.models.tokenizer import Bridge, TextStream, encode_prompt, token_bytes
from specdemo.models.tokenizer_check import TriedTokenizer, check_tokenizer, open_tokenizer
from specdemo.models.tokenizer_trial import TOKENIZER_TRIAL

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
    for seed in range(20):
        rng = random.Random(seed)
        tokens = [rng.randrange(len(tokenizer)) for _ in range(60)]
        tokens[30:30] = special
        for context in ([], tokens[:20] + word, tokens[:20] + word + special):
            stream = TextStream(tokenizer, context)
            pieces = [stream.push(token) for token in tokens]
            assert "".join(pieces) + stream.rest() == whole(tokenizer, context, tokens)


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


# --- rules of untrusted tokenizers ---

FAMILIES = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
}
LONG = ("Hello  world, 1234 naïve\n\n", "a" * 3000, " " * 3000, "\n" * 3000, "aA" * 1500, "1" * 3000, ".\n" * 1500)


def split_by(pattern: str, folder: Path) -> PreTrainedTokenizerBase:
    byte_level_tokenizer().save_pretrained(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    stored["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, stored["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return open_tokenizer("model", folder, PreTrainedTokenizerFast)


def test_known_patterns_split_long_texts() -> None:
    for pattern in KNOWN_PATTERNS:
        for text in LONG:
            pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text + "\u0301x")


@pytest.mark.parametrize("name", FAMILIES)
def test_patterns_of_families_are_known(name: str, tmp_path: Path) -> None:
    tokenizer = split_by(FAMILIES[name], tmp_path)
    assert not isinstance(tokenizer, TriedTokenizer)


@pytest.mark.slow
def test_tokenizers_with_other_patterns_are_tried_on_each_text(tmp_path: Path) -> None:
    tokenizer = split_by(r"\d{1,3}(?=(?:\d{3})*\b)|a*a*a*b", tmp_path)
    expected = byte_level_tokenizer().encode("def f(x): return x", add_special_tokens=False)
    assert encode_prompt(tokenizer, "def f(x): return x", False, 300)[-len(expected) :] == expected
    assert Bridge(tokenizer, tokenizer, []).read(expected) == expected
    hostile = "a" * 20_000 + "cb"
    for encode in (tokenizer, tokenizer.encode, lambda text: encode_prompt(tokenizer, text, True, 300, list)):
        with pytest.raises(UserError, match="the tokenizer .*: choose another model"):
            encode(hostile)
    with pytest.MonkeyPatch.context() as patch:  # each text is tried once
        patch.setattr(TOKENIZER_TRIAL, "request", lambda *request: pytest.fail(str(request)))
        tokenizer.encode("def f(x): return x", add_special_tokens=False)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["[a", "(" * 3000], ids=["open", "nested"])
def test_patterns_that_fail_on_a_sample_are_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the tokenizer of model .*: choose another model"):
        split_by(pattern, tmp_path)


def test_patterns_of_decoders_are_refused(tmp_path: Path) -> None:
    rule = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": rule}))
    with pytest.raises(UserError, match="decodes texts by unknown rules"):
        check_tokenizer("model", tmp_path)


@pytest.mark.parametrize(("length", "known"), [(33, True), (100_000, False)])
def test_normalization_tables_with_long_replacements_are_unknown(length: int, known: bool, tmp_path: Path) -> None:
    table = (4).to_bytes(4, "little") + bytes(4) + b"a\0" + b"b" * length + b"\0"
    rule = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": rule}))
    assert check_tokenizer("model", tmp_path) is known


def test_repeated_rules_that_lengthen_texts_are_unknown(tmp_path: Path) -> None:
    rule = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    for count in (1, 8):
        rules = {"type": "Sequence", "pretokenizers": [rule] * count}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"pre_tokenizer": rules}))
        assert check_tokenizer("model", tmp_path) is (count == 1)
