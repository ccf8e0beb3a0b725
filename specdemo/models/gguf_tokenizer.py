"""Conversion of the tokenizers of GGUF files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite
from typing import Any

from specdemo.core.errors import UserError, plain_text
from specdemo.models.gguf_file import GgufFile

VOCABULARY_KEY = "tokenizer.ggml.tokens"
_SPECIAL = ("bos", "eos", "unknown", "padding")
_NORMAL, _CONTROL = 1, 3
_USER_DEFINED, _UNUSED = 4, 5
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end|>", "<end_of_turn>")
_MAX_PIECES, _MAX_PIECE = 8_000_000, 1_000  # limits in characters, of all tokens and of a token

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}"
_PATTERNS = {
    "llama-bpe": rf"{_WORDS}\p{{N}}{{1,3}}{_REST}",
    "qwen2": rf"{_WORDS}\p{{N}}{_REST}",
    "tekken": rf"{_LETTERS}*{_LOWER}+|{_LETTERS}+{_LOWER}*|\p{{N}}{_REST}".replace(r"+[\r\n]*", r"+[\r\n/]*"),
}
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_PLAIN = ("gpt-2", "gpt2", "mpt", "olmo", "phi-2")
_WHOLE_WORDS = ("llama-bpe", "tekken")  # these tokenizers also begin with BOS


def tokenizer_settings(file: GgufFile) -> dict[str, dict[str, Any]]:
    tokens = _texts(file, VOCABULARY_KEY)
    if len({*tokens}) < len(tokens):
        raise file.refusal("a token occurs twice")
    kind = file.value("tokenizer.ggml.model", str)
    if kind == "gpt2":
        converted = _byte_level(file, tokens)
    elif kind == "llama":
        converted = _sentence_piece(file, tokens)
    else:
        raise file.refusal(f"its tokenizer {plain_text(kind, 40)!r} is unknown, supported are gpt2 and llama")
    ids = {name: _token_id(file, name, tokens) for name in (*_SPECIAL, "eot")}
    named = {name: tokens[token] for name, key in _NAMES.items() if (token := ids[key]) is not None}
    template = file.value("tokenizer.chat_template", str, "")
    types = _types(file, tokens)
    ends = {tokens.index(text) for text in _ENDS if text in tokens and types[tokens.index(text)] == _CONTROL}
    ends |= {token for token in (ids["eos"], ids["eot"]) if token is not None}
    return {
        "tokenizer.json": {"version": "1.0", "truncation": None, "padding": None} | converted,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        | named
        | ({"chat_template": template} if template else {}),
        "generation_config.json": {"bos_token_id": ids["bos"], "eos_token_id": sorted(ends) or None},
    }


_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    fallback = "qwen2" if file.value("general.architecture", str) != "llama" else "gpt-2"
    words = file.value("tokenizer.ggml.pre", str, fallback)
    words = _SAME.get(fallback if words == "default" else words, words)
    splits: list[dict[str, Any]] = []
    if words in _PATTERNS:
        splits.append(
            {"type": "Split", "pattern": {"Regex": _PATTERNS[words]}, "behavior": "Isolated", "invert": False}
        )
    elif words in _DIGITS:
        splits.append({"type": "Digits", "individual_digits": True})
    elif words not in _PLAIN:
        raise UserError(
            f"{file.name} splits texts by the unknown rule {plain_text(words, 40)!r}: choose the safetensors checkpoint"
        )
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits.append({**bytewise, "use_regex": words not in _PATTERNS})
    whole = words in _WHOLE_WORDS
    merges = [_pair(file, merge) for merge in _texts(file, "tokenizer.ggml.merges")]
    return {
        "normalizer": {"type": "NFC"} if words == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": {**bytewise, "use_regex": True},
        "post_processor": _template(file, tokens, whole),
        "added_tokens": list(_added(file, tokens)),
        "model": {"type": "BPE", "vocab": _vocabulary(file, tokens), "merges": merges, "ignore_merges": whole},
    }


def _sentence_piece(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    scores = file.value("tokenizer.ggml.scores", list)
    valid = len(scores) == len(tokens) and isinstance(scores[0], float) and all(map(isfinite, scores))
    if not valid or sum(map(len, tokens)) > _MAX_PIECES or max(map(len, tokens)) > _MAX_PIECE:
        raise file.refusal(f"its {len(tokens):,} tokens have {len(scores):,} scores, invalid scores, or are too long")
    spaced = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    text = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    unknown = _token_id(file, "unknown", tokens)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}] * spaced + [space]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [text, {"type": "ByteFallback"}, {"type": "Fuse"}] + [strip] * spaced,
        },
        "post_processor": _template(file, tokens, True),
        "added_tokens": list(_added(file, tokens)),
        "model": {
            "type": "BPE",
            "vocab": _vocabulary(file, tokens),
            "merges": _merges(tokens, scores, _types(file, tokens)),
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": None if unknown is None else tokens[unknown],
        },
    }


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    known = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL}
    merges = []
    for token in sorted(known, key=lambda token: -scores[known[token]]):
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in splits if left in known and right in known]
        merges += sorted(pairs, key=lambda pair: (known[pair[0]], known[pair[1]]))
    return merges


def _vocabulary(file: GgufFile, tokens: list[str]) -> dict[str, int]:
    types = _types(file, tokens)
    return {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED or not re.fullmatch(r"\[PAD\d+\]", token)}


def _types(file: GgufFile, tokens: list[str]) -> list[int]:
    types = file.value("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise file.refusal(f"its vocabulary has {len(tokens):,} tokens and {len(types):,} types")
    return types


def _added(file: GgufFile, tokens: list[str]) -> Iterator[dict[str, Any]]:
    named = {_token_id(file, name, tokens) for name in _SPECIAL}
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for i, kind in enumerate(_types(file, tokens)):
        if kind in (_CONTROL, _USER_DEFINED) or i in named:
            yield {"id": i, "content": tokens[i], **options, "special": kind != _USER_DEFINED}


def _template(file: GgufFile, tokens: list[str], begins: bool) -> dict[str, Any] | None:
    wanted = {"bos": begins, "eos": False}
    added = {}
    for name, default in wanted.items():
        token = _token_id(file, name, tokens)
        if file.value(f"tokenizer.ggml.add_{name}_token", bool, default) and token is not None:
            added[name] = {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
    if not added:
        return None

    def marks(name: str, part: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": added[name]["id"], "type_id": part}}] if name in added else []

    first, second = (
        [*marks("bos", part), {"Sequence": {"id": text, "type_id": part}}, *marks("eos", part)]
        for part, text in enumerate("AB")
    )
    special = {token["id"]: token for token in added.values()}
    return {"type": "TemplateProcessing", "single": first, "pair": first + second, "special_tokens": special}


def _token_id(file: GgufFile, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    token = file.value(key, int)
    if token == (1 << 32) - 1:  # the file has no such token
        return None
    if not 0 <= token < len(tokens):
        raise file.refusal(f"{key} is {token:,}, and it has {len(tokens):,} tokens")
    return token


def _texts(file: GgufFile, key: str) -> list[str]:
    values = file.value(key, list)
    if not values or not isinstance(values[0], str):
        raise file.refusal(f"{key} is not a list of texts")
    return values


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise file.refusal(f"it has the invalid merge {plain_text(merge, 40)!r}")
    return left, right
