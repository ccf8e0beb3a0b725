"""Tokenizers: opening of untrusted files, incremental detokenization, and re-encoding between vocabularies.

Tokens may be parts of characters or depend on their neighbours, so each is decoded as the difference to the text of the
preceding tokens. Rules of supported families are known; files with others are tried on each text in a process with
limits first.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, TokenizersBackend

from specdemo.core.errors import UserError, plain_text
from specdemo.core.texts import StopTexts
from specdemo.models.gguf_tokenizer import CHATS_BEGIN, KNOWN_PATTERNS
from specdemo.models.limited_process import try_tokenizer
from specdemo.models.untrusted import model_errors, read_settings, walk
from specdemo.models.zoo import SAMPLE_TEXT

if TYPE_CHECKING:
    from transformers import AutoTokenizer

_MAX_ADDED = 64  # characters, tokens or bytes that a known rule adds
_MAX_ADDED_TOKENS = 100_000
_GROWING = ("ByteLevel", "Precompiled")  # types of rules that multiply the length of a text
_TEXT_RULES = ("normalizer", "pre_tokenizer", "post_processor")
UNFINISHED = "\ufffd"  # decoded form of an incomplete character
_WINDOW = 6  # tokens of left context: 4 bytes and a space
# tokens of single bytes; if any, with special tokens, which decoding skips within a run
_byte_ids: WeakKeyDictionary[PreTrainedTokenizerBase, frozenset[int]] = WeakKeyDictionary()


def open_tokenizer(
    name: str, folder: Path, kind: type[PreTrainedTokenizerBase] | type[AutoTokenizer]
) -> PreTrainedTokenizerBase:
    path = folder / "tokenizer.json"
    is_known = check_tokenizer(name, folder)
    if not is_known:
        try_tokenizer(f"the tokenizer of {name}", path, SAMPLE_TEXT)
    with model_errors(f"the tokenizer of {name}", folder=folder):
        tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
        tokenizer.decode(tokenizer.encode(SAMPLE_TEXT))
    if not is_known:
        kind = type(tokenizer)
        tokenizer.__class__ = type(kind.__name__, (TriedTokenizer, kind), {"trial": path})
    return tokenizer


class TriedTokenizer:
    """Mixin of a tokenizer with unknown rules, which tries each text before."""

    trial: Path  # tokenizer.json

    def encode(self, text: str, *args: Any, **options: Any) -> Any:
        try_text(self, text)
        return super().encode(text, *args, **options)  # type: ignore[misc]

    def __call__(self, text: str, *args: Any, **options: Any) -> Any:
        try_text(self, text)
        return super().__call__(text, *args, **options)  # type: ignore[misc]


def try_text(tokenizer: object, text: str) -> None:
    """Raise `UserError` if a tokenizer with unknown rules takes too long for a text."""
    if isinstance(tokenizer, TriedTokenizer):
        try_tokenizer("the tokenizer", tokenizer.trial, text)


def check_tokenizer(name: str, folder: Path) -> bool:
    """Return True if all rules are known. Raises `UserError` for random rules and unknown rules of the decoder."""
    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json", folder / "added_tokens.json"):
        if path.exists():
            read_settings(name, path)
    path = folder / "tokenizer.json"
    if not path.exists():
        return True
    stored = read_settings(name, path)
    try:
        if isinstance(stored.get("model"), dict) and stored["model"].get("dropout"):
            raise ValueError("it splits the same text differently each time")
        if len(stored.get("added_tokens") or ()) > _MAX_ADDED_TOKENS:
            raise ValueError(f"it adds more than {_MAX_ADDED_TOKENS:,} tokens")
        if not _are_known(stored.get("decoder")):
            raise ValueError("it decodes texts by unknown rules")
        return all(_are_known(stored.get(kind)) for kind in _TEXT_RULES)
    except (ValueError, TypeError, AttributeError) as error:
        reason = plain_text(str(error), 150)
        raise UserError(f"the tokenizer of {name} is refused ({reason}): choose another model") from None


def _are_known(stored: Any) -> bool:
    """Return True for rules of supported families, and for others without growth of texts."""
    rules = [value for _, value in walk(stored) if isinstance(value, dict)]
    growing = sum(rule.get("type") in _GROWING for rule in rules)
    return growing <= 1 and all(map(_is_known, rules))


def _is_known(rule: Mapping[str, Any]) -> bool:
    encoded, pattern = rule.get("precompiled_charsmap"), rule.get("pattern") or {}
    if "Regex" in rule and str(rule["Regex"]) not in KNOWN_PATTERNS:
        return False
    if len(str(rule.get("prepend") or "")) > _MAX_ADDED:
        return False
    if isinstance(encoded, str):
        table = base64.b64decode(encoded)
        texts = table[4 + int.from_bytes(table[:4], "little") :]
        if max(map(len, texts.split(b"\0"))) > _MAX_ADDED:
            return False
    if rule.get("type") == "TemplateProcessing":
        single = rule.get("single") or ()
        return len(single) <= _MAX_ADDED and sum("Sequence" in piece for piece in single) <= 1
    return rule.get("type") != "Replace" or len(rule.get("content") or "") <= max(1, len(pattern.get("String", "")))


class TextStream:
    """Convert a growing token list to text pieces that concatenate to the decoded list; pieces may be empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        if tokenizer not in _byte_ids:
            vocabulary = tokenizer.get_vocab() if tokenizer.convert_tokens_to_ids("<0x00>") is not None else {}
            tokens = {vocabulary[name] for i in range(256) if (name := f"<0x{i:02X}>") in vocabulary}
            _byte_ids[tokenizer] = frozenset(tokens | {*tokenizer.all_special_ids} if tokens else ())
        self._bytes = _byte_ids[tokenizer]
        self._window = self._tail(context)
        self._shown = len(_decode(self._tokenizer, self._window))

    def _tail(self, tokens: Sequence[int]) -> list[int]:
        """Return the shortest suffix with visible text: leading spaces are lost at the start of a text."""
        size = _WINDOW
        while size < len(tokens) and not _decode(self._tokenizer, tokens[-size:]):
            size *= 2
        return list(tokens[-size:])

    def push(self, token: int) -> str:
        self._window.append(token)
        text = _decode(self._tokenizer, self._window)
        if token in self._bytes:
            run = next((i for i, x in enumerate(reversed(self._window)) if x not in self._bytes), len(self._window))
            complete = len(_decode(self._tokenizer, self._window[: len(self._window) - run]))
        else:
            complete = len(text) - text.endswith(UNFINISHED)
        if complete < self._shown:  # the text ends with a special token or incomplete bytes
            return ""
        piece = text[self._shown : complete]
        self._shown = complete
        if len(self._window) > 4 * _WINDOW and complete == len(text):
            self._window = self._tail(self._window)
            self._shown = len(_decode(self._tokenizer, self._window))
        return piece

    def flush(self) -> str:
        """Return the remaining text, such as incomplete bytes."""
        text = _decode(self._tokenizer, self._window)
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def fork(self) -> TextStream:
        twin = copy(self)
        twin._window = list(self._window)
        return twin

    def peek(self, tokens: Iterable[int], parents: Iterable[int]) -> list[str]:
        """Return the text of each draft node after its ancestors."""
        streams: list[TextStream] = []
        pieces = []
        for token, parent in zip(tokens, parents, strict=True):
            stream = (streams[parent] if parent >= 0 else self).fork()
            pieces.append(stream.push(token))
            streams.append(stream)
        return pieces


ChatMessage = dict[str, str]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    chat: bool,
    vocab_size: int,
    encode: Callable[..., list[int]] | None = None,
) -> list[int]:
    """Return the tokens of a text; `encode` replaces that of the tokenizer."""
    if encode is not None:
        try_text(tokenizer, text)
    with model_errors("the tokenizer", "cannot encode the prompt"):
        tokens = (encode or tokenizer.encode)(text, add_special_tokens=not chat)
        bos = tokenizer.encode("")[:1]
    if chat and tokenizer.init_kwargs.get(CHATS_BEGIN):
        tokens = bos + tokens
    written = next((i for i, token in enumerate(tokens) if [token] != bos), len(tokens))
    tokens = tokens[max(0, written - 1) :]  # without repetitions of BOS
    if not tokens:
        raise UserError("the tokenizer finds no tokens in the prompt: change it, or choose another model")
    return check_ids(tokens, vocab_size)


def prompt_pieces(tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each token of a prompt; together they are the prompt."""
    stream, offset = TextStream(tokenizer), 0
    pieces: list[str] = []
    for token in tokens:
        texts = stream.push(token), str(tokenizer.convert_ids_to_tokens(token))
        pieces.append(next((text for text in texts if text and prompt.startswith(text, offset)), ""))
        offset += len(pieces[-1])
    return (*pieces[:-1], pieces[-1] + prompt[offset:])


def stop_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> StopTexts:
    added = tokenizer.added_tokens_decoder.items() if texts else ()
    return StopTexts(texts, {token: mark.content for token, mark in added if mark.special})


def token_ids(prompt: Sequence[Any], chat: bool, vocab_size: int) -> list[int]:
    """Return the ids of a prompt that is encoded already."""
    if chat:
        raise UserError("a prompt of token ids takes no chat template: set chat to False, or give the conversation")
    if wrong := [token for token in prompt if not isinstance(token, int)]:
        raise UserError(f"a prompt of token ids must contain whole numbers only, not {wrong[0]!r}")
    return check_ids(list(prompt), vocab_size)


def check_ids(tokens: list[int], vocab_size: int) -> list[int]:
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise UserError(f"{wrong[0]:,} is not among the {vocab_size:,} token ids of the model: choose another model")
    return tokens


def has_entry(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return False for the padding of a vocabulary."""
    try:
        return tokenizer.convert_ids_to_tokens(token) is not None
    except IndexError:
        return False


class TokenNames:
    """Texts of alternative tokens, each returned once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._returned: set[int] = set()

    def fresh(self, tokens: Iterable[int]) -> dict[int, str]:
        new = dict.fromkeys(token for token in tokens if token not in self._returned)
        self._returned |= new.keys()
        return {t: self._tokenizer.batch_decode([[t]], clean_up_tokenization_spaces=False)[0] for t in new}


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Return the bytes of each token, empty for special tokens."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    byte_level, special = "ByteLevel" in repr(decoder), set(tokenizer.all_special_ids)
    added, known = tokenizer.get_added_vocab(), tokenizer.get_vocab()

    def piece(token: int, name: str | None) -> bytes:
        if name is None or token in special:
            return b""
        if name in added:
            return name.encode()
        if byte_level:
            return bytes(_BYTE_OF[character] for character in name) if _BYTE_OF.keys() >= {*name} else name.encode()
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode() if "<0x00>" in known else _decode(tokenizer, [token]).encode()

    return [piece(token, name) for token, name in enumerate(names)]


class TokenBytes:
    """Bytes and texts of single tokens; special tokens have their name."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> list[bytes]:
        return token_bytes(self._tokenizer)

    def of(self, token: int) -> bytes:
        if token < len(self._bytes) and self._bytes[token]:
            return self._bytes[token]
        name = self._tokenizer.convert_ids_to_tokens(token) if has_entry(self._tokenizer, token) else ""
        return str(name).encode()

    def text(self, token: int) -> str:
        """Return the text; incomplete characters become replacement characters."""
        return self.of(token).decode("utf-8", "replace")


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}  # bytes of the characters of byte-level tokenizers
_BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}
TAIL = 16  # tokens re-encoded when the text grows


class Bridge:
    """Re-encode a growing text between two vocabularies, at constant cost per step.

    Incomplete characters, special tokens and text altered by the tokenizer are dropped, which shortens the draft.
    """

    def __init__(
        self, target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, opening: Sequence[int]
    ) -> None:
        """`opening`: drafter tokens before any text. Raises `UserError` for tokenizers without character offsets."""
        for tokenizer in (target, drafter):
            if not tokenizer.is_fast:
                raise UserError(
                    f"{type(tokenizer).__name__} provides no character offsets, so its text cannot be re-encoded: "
                    "choose two models with one tokenizer"
                )
        self._target, self._drafter = target, drafter
        self._special = frozenset(drafter.all_special_ids)
        self._stream: TextStream | None = None
        self._seen = 0
        self._text = ""
        self._ids = list(opening)
        self._ends = [0] * len(self._ids)  # index of the character after each token

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Re-encode target `tokens` as drafter tokens, without an incomplete last character."""
        known = len(self._text)
        if self._stream is None:
            lengths = range(len(tokens), max(0, len(tokens) - TAIL), -1)
            self._seen = next((n for n in lengths if not _decode(self._target, tokens[:n]).endswith(UNFINISHED)), 0)
            self._text = _decode(self._target, tokens[: self._seen])
            self._stream = TextStream(self._target, tokens[: self._seen])
        self._text += "".join([self._stream.push(token) for token in tokens[self._seen :]])
        self._seen = len(tokens)
        if len(self._text) > known:
            self._reencode()
        return self._ids

    def write(self, tokens: Sequence[int], new: Sequence[int]) -> list[int]:
        """Re-encode drafter tokens `new` as target tokens that continue `tokens`; empty if impossible."""
        text = self._text_of(new)
        if not text:
            return []
        tail = list(tokens[-TAIL:])
        known = next(n for n in range(len(tail), -1, -1) if self._text.endswith(_decode(self._target, tail[:n])))
        before, pending = _decode(self._target, tail[:known]), tail[known:]
        # Encode with the preceding words, or separately if a token spans the boundary.
        for context, start in ((before + text, len(before)), (text, 0)):
            ids, spans = _encode(self._target, context)
            encoded = [token for token, (_, end) in zip(ids, spans, strict=True) if end > start]
            if encoded[: len(pending)] == pending:
                encoded = encoded[len(pending) :]
                if _decode(self._target, tail + encoded) == before + text:
                    return encoded
        return []

    def _reencode(self) -> None:
        """Re-encode the end of the text up to the first boundary shared by old and new tokens.

        A first token in mid-text may differ (added space, partial word); later tokens do not.
        """
        first = max(0, len(self._ends) - TAIL)
        old = {end: i for i, end in enumerate(self._ends[first:], first + 1)}
        start = min(old, default=0)
        ids, spans = _encode(self._drafter, self._text[start:])
        ends = [start + end for _, end in spans]
        new = {end: i for i, end in enumerate(ends, 1)}
        agreed = min((end for end in new if end in old and end > start), default=start)
        old_count, new_count = old.get(agreed, 0), new.get(agreed, 0)
        self._ids[old_count:], self._ends[old_count:] = ids[new_count:], ends[new_count:]

    def _text_of(self, new: Sequence[int]) -> str:
        count = next((i for i, token in enumerate(new) if token in self._special), len(new))
        tail = self._ids[-TAIL:]
        before, after = (_decode(self._drafter, ids) for ids in (tail, [*tail, *new[:count]]))
        return after[len(before) :].partition(UNFINISHED)[0] if after.startswith(before) else ""


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    if getattr(type(tokenizer), "_decode", None) is TokenizersBackend._decode:
        return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    return tokenizer.batch_decode([list(ids)], skip_special_tokens=True, clean_up_tokenization_spaces=False)[0]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoding["input_ids"], encoding["offset_mapping"]
