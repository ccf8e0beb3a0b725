"""Prompts as tokens.

A mark in each control token of a message is removed after the tokenizer has recognised those of the template, so that
text of a message never becomes a control token.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias, TypeGuard, cast
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from specdemo.core.errors import UserError, check_unicode
from specdemo.models.chat_template import CLOCK, CONTINUE, at_time, parse_options, render_chat
from specdemo.models.tokenizer import ChatMessage, encode_prompt, token_ids
from specdemo.models.untrusted import model_errors

PromptOrChat: TypeAlias = "str | Sequence[ChatMessage] | Sequence[int]"

_MARK, _END = "\ufdd0", "\ufdd1"  # Unicode noncharacters, which texts do not contain
_ANSWER = "An answer."
_turn_ends: WeakKeyDictionary[PreTrainedTokenizerBase, int | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class EncodedPrompt:
    """Prompt with the options that its template used and the time before it was tokenised."""

    text: str
    tokens: list[int]
    options: tuple[str, ...]
    start: float


def check_prompt(prompt: object, chat: bool) -> None:
    """Raise `UserError` unless a prompt is a text, a list of token ids, or messages for a chat template."""
    parts: Sequence[Any] = prompt if isinstance(prompt, Sequence) else ()
    messages = all(isinstance(part, Mapping) and isinstance(part.get("content"), str) for part in parts)
    if not (parts and (isinstance(parts, str) or isinstance(parts[0], int) or messages)):
        raise UserError("the prompt is invalid: give a text, token ids, or messages with a content that is a text")
    if messages and not chat:
        raise UserError("messages need a chat template: set chat to True, or give a text")


def is_encoded(prompt: PromptOrChat) -> TypeGuard[Sequence[int]]:
    return not isinstance(prompt, str) and isinstance(prompt[0], int)


def read_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: PromptOrChat,
    chat: bool,
    vocab_size: int,
    options: Sequence[str] = (),
) -> EncodedPrompt:
    """Tokenise a prompt; with `chat`, a text is a user message. Raises `UserError`."""
    if is_encoded(prompt):
        ids = token_ids(prompt, chat, vocab_size)
        return EncodedPrompt(str(tokenizer.decode(ids)), ids, (), time.perf_counter())
    if not chat:
        text, start = cast(str, prompt), time.perf_counter()
        check_unicode("the prompt", text)
        return EncodedPrompt(text, encode_prompt(tokenizer, text, False, vocab_size), (), start)
    with model_errors("the chat template"):
        template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    if not isinstance(template, str):
        raise UserError("this model has no chat template: disable the chat option")
    given = cast("str | Sequence[ChatMessage]", prompt)
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    check_unicode("the prompt", "".join(_strings(messages)))
    if not messages[-1]["content"].strip():
        raise UserError("the prompt is empty: write a message")
    if CLOCK in template:
        used = at_time(options, datetime.now())
    else:
        used = tuple(text for text in options if text.partition("=")[0] != CLOCK)
    text, marked = _render(tokenizer, template, messages, parse_options(used))
    check_unicode("the prompt", text)
    encode = None if marked == text else _unmarking_encoder(tokenizer)
    start = time.perf_counter()
    return EncodedPrompt(text, encode_prompt(tokenizer, marked, True, vocab_size, encode), used, start)


def _render(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: Sequence[ChatMessage], values: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the text without and with marks."""
    continued = bool(values.get(CONTINUE))
    if continued:
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END}]
    added = [token for token in tokenizer.added_tokens_decoder.values() if len(token.content) > 1]
    special = {token.content for token in added if token.special}
    others = {token.content for token in added if token.content in template and not token.content.isalnum()}
    written = special | {text for text in others if text == text.strip()}
    conversations = [messages]
    if typed := [token for token in written if any(token in text for text in _strings(messages))]:
        if _MARK in "".join(_strings(messages)):
            raise UserError(f"the prompt contains the invalid character U+{ord(_MARK):04X}: remove it")
        # Templates look for some tokens in answers, such as the end of a thought.
        own = [token for token in typed if token in special]
        conversations += [
            [_marked(message, answers if message["role"] == "assistant" else typed) for message in messages]
            for answers in (own, [])
        ]
    given = {CLOCK: "2000-01-01", **values}
    text, *variants = render_chat(template, conversations, tokenizer.special_tokens_map, given)
    marked = next((variant for variant in variants or [text] if variant.replace(_MARK, "") == text), None)
    if marked is None:
        raise UserError(f"the chat template changes the control token {typed[0]!r} of a message: remove it")
    return (_cut(text), _cut(marked)) if continued else (text, marked)


def _cut(text: str) -> str:
    before, end, _ = text.rpartition(_END)
    if not end:
        raise UserError(f"the chat template hides the message to continue: omit {CONTINUE}")
    return before


def _strings(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return (value for message in messages for value in message.values() if isinstance(value, str))


def _marked(message: ChatMessage, tokens: Collection[str]) -> ChatMessage:
    """Write a mark after the first character of each of `tokens`."""
    if not tokens:
        return message
    pattern = re.compile(f"(?=({'|'.join(map(re.escape, tokens))}))(.)", re.DOTALL)
    return {
        name: pattern.sub(rf"\2{_MARK}", value) if isinstance(value, str) else value for name, value in message.items()
    }


def _unmarking_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[..., list[int]]:
    """Return a tokenizer that removes marks after the search for control tokens."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} cannot separate text and control tokens: remove them from the message"
        )
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    unmark = {"type": "Replace", "pattern": {"String": _MARK}, "content": ""}
    normalizers = [unmark, *filter(None, [settings["normalizer"]])]
    settings |= {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "truncation": None,
        "padding": None,
    }
    for token in settings["added_tokens"]:
        token["normalized"] = False  # typed before marks are removed
    encoder = Tokenizer.from_str(json.dumps(settings))
    return lambda text, **options: encoder.encode(text, **options).ids


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the mark that the chat template writes after an answer, or None."""
    if tokenizer not in _turn_ends:
        messages = [{"role": role, "content": _ANSWER} for role in ("user", "assistant", "user")]
        try:
            written = read_prompt(tokenizer, messages, True, len(tokenizer)).text.split(_ANSWER)
        except UserError:  # no template for this conversation
            written = []
        following = written[2].lstrip() if len(written) == 4 else ""
        mark, vocabulary = re.match(r"<[^<>\s]+>", following), tokenizer.get_vocab()
        texts = [*tokenizer.get_added_vocab(), *([mark[0]] if mark else [])]
        ends = [text for text in texts if text in vocabulary and following.startswith(text)]
        _turn_ends[tokenizer] = vocabulary[max(ends, key=len)] if ends else None
    return _turn_ends[tokenizer]
