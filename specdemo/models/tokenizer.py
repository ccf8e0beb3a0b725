"""Incremental detokenization and chat templates.

Tokens may be parts of characters or depend on their neighbours, so each is decoded as the difference to the text of the
preceding tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from transformers import PreTrainedTokenizerBase

from specdemo.core.errors import UserError

UNFINISHED = "\ufffd"  # decoded form of an incomplete character
_WINDOW = 6  # tokens of left context: 4 bytes of a character and a space


class TextStream:
    """Convert a growing token list to text pieces that concatenate to the decoded list; pieces may be empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        """`context`: prompt tokens."""
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab() if tokenizer.convert_tokens_to_ids("<0x00>") is not None else {}
        self._bytes = {vocabulary[name] for i in range(256) if (name := f"<0x{i:02X}>") in vocabulary}
        if self._bytes:
            self._bytes.update(tokenizer.all_special_ids)  # skipped in decoding, so byte runs continue across them
        self._window = self._tail(context)
        self._shown = len(self._decode(self._window))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _tail(self, tokens: Sequence[int]) -> list[int]:
        """Return the shortest suffix with visible text: leading spaces are lost at the start of a text."""
        size = _WINDOW
        while size < len(tokens) and not self._decode(tokens[-size:]):
            size *= 2
        return list(tokens[-size:])

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if token in self._bytes:
            run = next((i for i, x in enumerate(reversed(self._window)) if x not in self._bytes), len(self._window))
            complete = len(self._decode(self._window[: len(self._window) - run]))
        else:
            complete = len(text) - text.endswith(UNFINISHED)
        if complete < self._shown:  # a special token or incomplete bytes
            return ""
        piece = text[self._shown : complete]
        self._shown = complete
        if len(self._window) > 4 * _WINDOW and complete == len(text):
            self._window = self._tail(self._window)
            self._shown = len(self._decode(self._window))
        return piece

    def rest(self) -> str:
        """Return the remaining text, such as incomplete bytes."""
        text = self._decode(self._window)
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def fork(self) -> TextStream:
        """Return an independent copy for decoding draft tokens."""
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


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[ChatMessage], chat: bool
) -> tuple[str, list[int]]:
    """Return the model input as text and tokens. With `chat`, `prompt` is a user message or a conversation."""
    if not chat:
        assert isinstance(prompt, str)
        return prompt, tokenizer.encode(prompt)
    if not tokenizer.chat_template:
        raise UserError("this model has no chat template: disable the chat option")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text, tokenizer.encode(text, add_special_tokens=False)


class TokenNames:
    """Texts of alternative tokens, each returned once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._returned: set[int] = set()

    def fresh(self, tokens: Iterable[int]) -> dict[int, str]:
        new = dict.fromkeys(token for token in tokens if token not in self._returned)
        self._returned |= new.keys()
        return {token: self._tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in new}
