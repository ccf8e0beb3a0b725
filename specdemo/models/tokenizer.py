"""Token ids to text pieces that join up to exactly what decoding the whole sequence gives.

Byte-level tokenizers split characters over tokens and sentencepiece hangs meaning on the neighbours, so a token is
decoded as the difference that it makes behind the tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

from transformers import PreTrainedTokenizerBase

from specdemo.core.errors import UserError

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are not a character (yet)
WINDOW = 6  # tokens of left context: enough for any character (4 bytes) and for a leading space


class TextStream:
    """Text of a growing token list, piece by piece.

    A piece may be empty: the bytes of a character come out with the token that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        """`context`: the tokens before the first piece (the prompt)."""
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab() if tokenizer.convert_tokens_to_ids("<0x00>") is not None else {}
        self._bytes = {vocabulary[name] for i in range(256) if (name := f"<0x{i:02X}>") in vocabulary}
        if self._bytes:
            self._bytes.update(tokenizer.all_special_ids)  # they are skipped, so a run of bytes goes on across them
        self._window = self._tail(context)
        self._shown = len(self._decode(self._window))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _tail(self, tokens: Sequence[int]) -> list[int]:
        """The last tokens, as many as it takes to have some text: at the start of a text spaces are lost."""
        size = WINDOW
        while size < len(tokens) and not self._decode(tokens[-size:]):
            size *= 2
        return list(tokens[-size:])

    def push(self, token: int) -> str:
        """The text that is certain now and was not before `token`."""
        self._window.append(token)
        text = self._decode(self._window)
        if token in self._bytes:  # sentencepiece judges a run of bytes as a whole, so it stays open to its end
            run = next((i for i, one in enumerate(reversed(self._window)) if one not in self._bytes), len(self._window))
            certain = len(self._decode(self._window[: len(self._window) - run]))
        else:
            certain = len(text) - text.endswith(UNFINISHED)
        if certain < self._shown:  # a special token, or bytes still open
            return ""
        piece = text[self._shown : certain]
        self._shown = certain
        if len(self._window) > 4 * WINDOW and certain == len(text):
            self._window = self._tail(self._window)
            self._shown = len(self._decode(self._window))
        return piece

    def rest(self) -> str:
        """What is still open at the end: bytes that never became a character."""
        text = self._decode(self._window)
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def fork(self) -> TextStream:
        """An independent copy, to spell out tokens that may not be kept."""
        twin = copy(self)
        twin._window = list(self._window)
        return twin

    def peek(self, tokens: Iterable[int], parents: Iterable[int]) -> list[str]:
        """The piece of each node of a forest behind this text, in the context it was proposed in."""
        streams: list[TextStream] = []
        pieces = []
        for token, parent in zip(tokens, parents, strict=True):
            stream = (streams[parent] if parent >= 0 else self).fork()
            pieces.append(stream.push(token))
            streams.append(stream)
        return pieces


ChatMessage = dict[str, str]  # role and content, as chat templates have them


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[ChatMessage], chat: bool
) -> tuple[str, list[int]]:
    """The text that the model reads, and its tokens. With `chat`, a prompt is what a user says, or a conversation.

    A template writes special tokens itself, so none are added to it. Raises `UserError` where the model has none.
    """
    if not chat:
        assert isinstance(prompt, str)
        return prompt, tokenizer.encode(prompt)
    if not tokenizer.chat_template:
        raise UserError("this model has no chat template: it continues texts, so leave the chat template off")
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return text, tokenizer.encode(text, add_special_tokens=False)


class TokenNames:
    """Texts of single tokens, each given once: to name those that were likely and not chosen."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._given: set[int] = set()

    def fresh(self, tokens: Iterable[int]) -> dict[int, str]:
        """The texts of those that were not asked for before; bytes that are no character alone are shown as such."""
        new = dict.fromkeys(token for token in tokens if token not in self._given)
        self._given |= new.keys()
        return {token: self._tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in new}
