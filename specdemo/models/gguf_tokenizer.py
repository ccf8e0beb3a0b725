"""Conversion of the tokenizers of GGUF files, with the tables of llama.cpp (llama-vocab.cpp)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specdemo.core.errors import UserError, plain_text
from specdemo.models.gguf_file import GgufFile
from specdemo.models.untrusted import model_errors

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
_END_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_TEXTS = {  # marks of answers and of files of code, which files may not name
    *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
    *("<REPO>", "<reponame>", "<|file_sep|>"),
}

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


_RULES = (
    _Rule("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    _Rule("llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0", _LLAMA3, True, True),
    _Rule("dbrx smaug-bpe", _LLAMA3),
    _Rule("qwen2 deepseek-r1-qwen kormo megrez", _QWEN2),
    _Rule("tekken", (rf"{_LETTERS}*{_LOWER}+|{_LETTERS}+{_LOWER}*|\p{{N}}{_SLASHES}",), True, True),
    _Rule(
        "gpt-4o",
        (rf"{_LETTERS}*{_LOWER}+{_ENDINGS}|{_LETTERS}+{_LOWER}*{_ENDINGS}|\p{{N}}{{1,3}}{_SLASHES}",),
    ),
    _Rule("seed-coder", (rf"{_WORDS}\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    _Rule("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    _Rule("starcoder refact smollm minerva-7b", (r"\p{N}", _GPT2)),
    _Rule("gpt-2 gpt2 olmo trillion granite-docling exaone4 gigachat a.x-4.0 mellum roberta-bpe", (_GPT2,)),
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
    """Rules, options of the tokenizer, and the tokens that begin and end a text."""

    rules: Tokenizer
    options: Mapping[str, Any]
    generation: Mapping[str, Any]


def read_gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    vocabulary = _read_vocabulary(file)
    convert = _sentence_piece if vocabulary.rule is _SENTENCE_PIECE else _byte_level
    special = ((name, vocabulary.named[key]) for name, key in _NAMES.items())
    template = file.value("tokenizer.chat_template", str, "")
    options = {
        "clean_up_tokenization_spaces": False,
        CHATS_BEGIN: vocabulary.begins,
        GUESSES: vocabulary.guesses,
        **{name: vocabulary.tokens[token] for name, token in special if token is not None},
        **({"chat_template": template} if template else {}),
    }
    marks = {i for i, text in enumerate(vocabulary.tokens) if text in _END_TEXTS}
    for i in marks:
        vocabulary.types[i] = _CONTROL
    ends = marks | {token for name in _END_IDS if (token := vocabulary.ids[name]) is not None}
    named = {vocabulary.named[key] for key in _NAMES.values()}
    added = [
        AddedToken(vocabulary.tokens[i], normalized=False, special=kind != _USER_DEFINED)
        for i, kind in enumerate(vocabulary.types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or i in named
    ]
    with model_errors(f"the tokenizer of {file.name}"):
        rules = convert(vocabulary)
        rules.add_tokens(added)
        rules.post_processor = _template(vocabulary)
    return GgufTokenizer(rules, options, {"bos_token_id": vocabulary.ids["bos"], "eos_token_id": sorted(ends) or None})


def _read_vocabulary(file: GgufFile) -> _Vocabulary:
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_texts(file, VOCABULARY_KEY))]
    if len({*tokens}) < len(tokens):
        raise file.refusal("a token occurs twice")
    kind = file.value("tokenizer.ggml.model", str)
    if kind not in _DEFAULT_IDS:
        raise file.refusal(f"its tokenizer {plain_text(kind, 40)!r} is unknown, supported are gpt2 and llama")
    if forbidden := file.value("tokenizer.ggml.suppress_tokens", list, []):
        raise file.refusal(f"it forbids {len(forbidden):,} tokens, which is not supported")
    stored = {name: _token_id(file, name, len(tokens)) for name in (*_NAMES.values(), *_END_IDS)}
    ids = {name: _DEFAULT_IDS[kind].get(name) if token is None else token for name, token in stored.items()}
    ids = {name: None if token is None or token >= len(tokens) else token for name, token in ids.items()}
    types = _lengthened(file, "tokenizer.ggml.token_type", len(tokens), _NORMAL)
    if kind == "llama":
        return _Vocabulary(file, tokens, types, ids, ids, _SENTENCE_PIECE)
    split = file.value(_PRE, str, "") or "default"
    rule = next((rule for rule in _RULES if split in rule.names.split()), None)
    if rule is None:
        raise UserError(
            f"{file.name} splits texts by the unknown rule {plain_text(split, 40)!r}: choose the safetensors checkpoint"
        )
    return _Vocabulary(file, tokens, types, ids, stored, rule)


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    file, rule = vocabulary.file, vocabulary.rule
    texts = _texts(file, "tokenizer.ggml.merges", empty=True)
    merges = [(left, right) for left, _, right in (text.partition(" ") for text in texts)]
    if wrong := [text for text, parts in zip(texts, merges, strict=True) if not all(parts)]:
        raise file.refusal(f"it has the invalid merge {plain_text(wrong[0], 40)!r}")
    tokenizer = Tokenizer(models.BPE(_entries(vocabulary), merges, ignore_merges=rule.whole_words))
    if file.metadata.get(_PRE) in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in rule.expressions]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(vocabulary: _Vocabulary) -> Tokenizer:
    file, tokens = vocabulary.file, vocabulary.tokens
    scores = _lengthened(file, "tokenizer.ggml.scores", len(tokens), 0.0)
    valid = isinstance(scores[0], (int, float)) and all(map(isfinite, scores)) and len({*scores}) > 1
    if not valid or sum(map(len, tokens)) > _MAX_PIECES or max(map(len, tokens)) > _MAX_PIECE:
        raise file.refusal(f"its {len(tokens):,} tokens have no scores, equal or invalid scores, or are too long")
    spaced = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    unknown = vocabulary.ids["unknown"]
    tokenizer = Tokenizer(
        models.BPE(
            _entries(vocabulary),
            _merges(tokens, scores, vocabulary.types),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * spaced + [normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()] + [decoders.Strip(" ", 1, 0)] * spaced
    )
    return tokenizer


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


def _template(vocabulary: _Vocabulary) -> processors.TemplateProcessing | None:
    """Return the rule that adds the first and the last token of a text."""
    ids, adds_end = vocabulary.ids, vocabulary.file.value("tokenizer.ggml.add_eos_token", bool, False)
    written = {"bos": ids["bos"] if vocabulary.begins else None, "eos": ids["eos"] if adds_end else None}
    added = {name: token for name, token in written.items() if token is not None}
    if not added:
        return None
    text = [name for name in ("bos", "$A", "eos") if name in ("$A", *added)]
    special = [{"id": name, "ids": [token], "tokens": [vocabulary.tokens[token]]} for name, token in added.items()]
    return processors.TemplateProcessing(single=text, special_tokens=special)


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
