"""Conversion of the tokenizers of GGUF files, with the tables of llama.cpp (llama-vocab.cpp)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from typing import Any

from specdemo.core.errors import UserError, plain_text
from specdemo.models.gguf_file import GgufFile

VOCABULARY_KEY = "tokenizer.ggml.tokens"
CHATS_BEGIN, GUESSES = "chats_begin_with_bos", "guesses"  # options of tokenizers
_PRE = "tokenizer.ggml.pre"
_NORMAL, _UNKNOWN = 1, 2
_CONTROL, _USER_DEFINED = 3, 4
_UNUSED = 5
_NO_TOKEN = (1 << 32) - 1
_MAX_PIECES, _MAX_PIECE = 8_000_000, 1_000  # limits in characters, of all tokens and of a token

_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_DEFAULT_IDS: dict[str, dict[str, int]] = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {"bos": 11, "eos": 11}}
_IDS = ("bos", "eos", "unknown", "padding", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_TEXTS = (
    *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "[e~[", "<|eot_id|>", "<|eom_id|>", "<|im_end|>"),
    *("<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>"),
)
_CALLS, _PARTS = frozenset(("<|call|>", "<|calls|>")), frozenset(("<|return|>", "<|flush|>"))
_OTHER_ENDS = frozenset(("<|tool_response>", "<|plamo:eos|>"))
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_FILL_TEXTS = {  # names of the tokens whose id a file does not contain
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_FILL_MARKS = (
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
    *("<|prefix|>", "<|suffix|>", "<|middle|>"),
)

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}"
_SLASHES = _REST.replace(r"+[\r\n]*", r"+[\r\n/]*")
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (rf"{_WORDS}\p{{N}}{{1,3}}{_REST}",)
_QWEN2 = (rf"{_WORDS}\p{{N}}{_REST}",)


@dataclass(frozen=True)
class _Rule:
    """Expressions that split a text into words, applied in turn."""

    names: str
    expressions: tuple[str, ...]
    whole_words: bool = False  # words in the vocabulary are not merged
    begins: bool = False  # default of add_bos_token
    has_bos: bool = True


_RULES = (
    _Rule("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    _Rule("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3, True, True),
    _Rule("dbrx smaug-bpe", _LLAMA3),
    _Rule("chatglm-bpe", _LLAMA3, has_bos=False),
    _Rule("glm4 glm5", _LLAMA3, True, has_bos=False),
    _Rule("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    _Rule("tekken", (rf"{_LETTERS}*{_LOWER}+|{_LETTERS}+{_LOWER}*|\p{{N}}{_SLASHES}",), True, True),
    _Rule(
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        (rf"{_LETTERS}*{_LOWER}+{_ENDINGS}|{_LETTERS}+{_LOWER}*{_ENDINGS}|\p{{N}}{{1,3}}{_SLASHES}",),
    ),
    _Rule("seed-coder", (rf"{_WORDS}\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    _Rule("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    _Rule("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", (r"\p{N}", _GPT2)),
    _Rule(
        "gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert "
        "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
        (_GPT2,),
    ),
)
_CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s+"
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_OTHERS = (_CL100K, _BLOOM, *_DEEPSEEK, " {2,}", r"\n| {2,}")  # also of T5 and of the bundled pair
KNOWN_PATTERNS = frozenset((*_OTHERS, *(expression for rule in _RULES for expression in rule.expressions)))
_NFC = ("qwen2", "deepseek-r1-qwen")
_SENTENCE_PIECE = _Rule("", (), begins=True)


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens of a file, corrected and completed like llama.cpp."""

    file: GgufFile
    tokens: list[str]
    types: list[int]
    ids: dict[str, int | None]
    named: dict[str, int | None]  # ids that are no guesses
    ends: frozenset[int]
    rule: _Rule

    @property
    def begins(self) -> bool:
        return self.file.value("tokenizer.ggml.add_bos_token", bool, self.rule.begins) and self.ids["bos"] is not None

    @property
    def guesses(self) -> list[str]:
        guesses = []
        if self.rule is _RULES[0] and not self.file.value(_PRE, str, ""):
            guesses.append("text split by a default rule as in llama.cpp, since the file names none")
        if self.named["eos"] is None and self.ids["eos"] is not None:
            guesses.append(f"token {self.ids['eos']} ends a text as in llama.cpp, since the file names no end")
        return guesses


@dataclass(frozen=True)
class GgufTokenizer:
    """Content of tokenizer.json, options of the tokenizer, and the tokens that begin and end a text."""

    rules: Mapping[str, Any]
    options: Mapping[str, Any]
    generation: Mapping[str, Any]


def read_gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    vocabulary = _read_vocabulary(file)
    convert = _sentence_piece if vocabulary.rule is _SENTENCE_PIECE else _byte_level
    special = ((name, vocabulary.named[key]) for name, key in _NAMES.items())
    template = file.value("tokenizer.chat_template", str, "")
    return GgufTokenizer(
        {"version": "1.0", "truncation": None, "padding": None} | convert(vocabulary),
        {
            "clean_up_tokenization_spaces": False,
            CHATS_BEGIN: vocabulary.begins,
            GUESSES: vocabulary.guesses,
            **{name: vocabulary.tokens[token] for name, token in special if token is not None},
            **({"chat_template": template} if template else {}),
        },
        {"bos_token_id": vocabulary.ids["bos"], "eos_token_id": sorted(vocabulary.ends) or None},
    )


def _read_vocabulary(file: GgufFile) -> _Vocabulary:
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_texts(file, VOCABULARY_KEY))]
    if len({*tokens}) < len(tokens):
        raise file.refusal("a token occurs twice")
    kind = file.value("tokenizer.ggml.model", str)
    if kind not in _DEFAULT_IDS:
        raise file.refusal(f"its tokenizer {plain_text(kind, 40)!r} is unknown, supported are gpt2 and llama")
    if forbidden := file.value("tokenizer.ggml.suppress_tokens", list, []):
        raise file.refusal(f"it forbids {len(forbidden):,} tokens, which is not supported")
    rule = _rule(file) if kind == "gpt2" else _SENTENCE_PIECE
    stored = {name: _token_id(file, name, len(tokens)) for name in _IDS}
    ids = {name: _DEFAULT_IDS[kind].get(name) if token is None else token for name, token in stored.items()}
    ids = {name: None if token is None or token >= len(tokens) else token for name, token in ids.items()}
    if stored["bos"] is None and not rule.has_bos:
        ids["bos"] = None
    positions = {token: i for i, token in enumerate(tokens)}
    for name, texts in _FILL_TEXTS.items():
        if ids[name] is None:
            ids[name] = min((positions[text] for text in texts if text in positions), default=None)
    types = _lengthened(file, "tokenizer.ggml.token_type", len(tokens), _NORMAL)
    ends = _set_marks(tokens, positions, types, ids)
    return _Vocabulary(file, tokens, types, ids, stored if kind == "gpt2" else ids, ends, rule)


def _set_marks(
    tokens: Sequence[str], positions: Mapping[str, int], types: list[int], ids: Mapping[str, int | None]
) -> frozenset[int]:
    """Correct the types of known marks; return the tokens that end a text."""
    marks = dict.fromkeys((*_END_TEXTS, *_FILL_MARKS, *chain(*_FILL_TEXTS.values())), _CONTROL)
    marks |= dict.fromkeys(_SHOWN, _USER_DEFINED)
    ends = {positions[text] for text in _END_TEXTS if text in positions}
    ends |= {token for name in _END_IDS if (token := ids[name]) is not None}
    end_texts = {tokens[token] for token in ends}
    if end_texts & _CALLS and end_texts & _PARTS:
        marks["<|end|>"] = _USER_DEFINED  # ends a part of an answer
    if end_texts & _OTHER_ENDS:
        marks["</s>"] = _NORMAL
    for text in marks.keys() & positions.keys():
        types[positions[text]] = marks[text]
        if marks[text] != _CONTROL:
            ends.discard(positions[text])
    return frozenset(ends)


def _rule(file: GgufFile) -> _Rule:
    name = file.value(_PRE, str, "") or "default"
    for rule in _RULES:
        if name in rule.names.split():
            return rule
    raise UserError(
        f"{file.name} splits texts by the unknown rule {plain_text(name, 40)!r}: choose the safetensors checkpoint"
    )


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    file, rule = vocabulary.file, vocabulary.rule
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in rule.expressions
    ]
    merges = [_pair(file, merge) for merge in _texts(file, "tokenizer.ggml.merges", empty=True)]
    return {
        "normalizer": {"type": "NFC"} if file.metadata.get(_PRE) in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, {**bytewise, "use_regex": False}]},
        "decoder": {**bytewise, "use_regex": True},
        "post_processor": _template(vocabulary),
        "added_tokens": list(_added(vocabulary)),
        "model": {
            "type": "BPE",
            "vocab": _entries(vocabulary),
            "merges": merges,
            "ignore_merges": rule.whole_words,
        },
    }


def _sentence_piece(vocabulary: _Vocabulary) -> dict[str, Any]:
    file, tokens = vocabulary.file, vocabulary.tokens
    scores = _lengthened(file, "tokenizer.ggml.scores", len(tokens), 0.0)
    valid = isinstance(scores[0], (int, float)) and all(map(isfinite, scores)) and len({*scores}) > 1
    if not valid or sum(map(len, tokens)) > _MAX_PIECES or max(map(len, tokens)) > _MAX_PIECE:
        raise file.refusal(f"its {len(tokens):,} tokens have no scores, equal or invalid scores, or are too long")
    spaced = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    text = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    unknown = vocabulary.ids["unknown"]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}] * spaced + [space]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [text, {"type": "ByteFallback"}, {"type": "Fuse"}] + [strip] * spaced,
        },
        "post_processor": _template(vocabulary),
        "added_tokens": list(_added(vocabulary)),
        "model": {
            "type": "BPE",
            "vocab": _entries(vocabulary),
            "merges": _merges(tokens, scores, vocabulary.types),
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


def _entries(vocabulary: _Vocabulary) -> dict[str, int]:
    padding = re.compile(r"\[PAD\d+\]")
    types = vocabulary.types
    return {
        token: i for i, token in enumerate(vocabulary.tokens) if types[i] != _UNUSED or not padding.fullmatch(token)
    }


def _lengthened(file: GgufFile, key: str, count: int, default: Any) -> list[Any]:
    """Return a value per token. Raises `UserError` for shorter lists."""
    values = file.value(key, list, [default] * count)
    if len(values) < count:
        raise file.refusal(f"its vocabulary has {count:,} tokens and {len(values):,} values of {key}")
    return values[:count]


def _added(vocabulary: _Vocabulary) -> Iterator[dict[str, Any]]:
    named = {vocabulary.named[key] for key in _NAMES.values()}
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    strips = re.search("phi-?3", str(vocabulary.file.metadata.get("general.name")).lower())
    for i, kind in enumerate(vocabulary.types):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or i in named:
            text = vocabulary.tokens[i]
            options["rstrip"] = bool(strips) and text not in ("<unk>", "<s>", "<|endoftext|>")
            yield {"id": i, "content": text, **options, "special": kind != _USER_DEFINED}


def _template(vocabulary: _Vocabulary) -> dict[str, Any] | None:
    wanted = {"bos": vocabulary.begins, "eos": vocabulary.file.value("tokenizer.ggml.add_eos_token", bool, False)}
    added = {}
    for name, written in wanted.items():
        token = vocabulary.ids[name]
        if written and token is not None:
            text = vocabulary.tokens[token]
            added[name] = {"id": text, "ids": [token], "tokens": [text]}
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


def _token_id(file: GgufFile, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token = file.value(key, int, _NO_TOKEN)
    if token == _NO_TOKEN:
        return None
    if not 0 <= token < count:
        raise file.refusal(f"{key} is {token:,}, and it has {count:,} tokens")
    return token


def _texts(file: GgufFile, key: str, empty: bool = False) -> list[str]:
    values = file.value(key, list)
    if not all(isinstance(value, str) for value in values[:1]) or not (values or empty):
        raise file.refusal(f"{key} is not a list of texts")
    return values


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise file.refusal(f"it has the invalid merge {plain_text(merge, 40)!r}")
    return left, right
