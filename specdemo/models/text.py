"""Token ids to text pieces that join up to exactly what decoding the whole sequence gives.

Byte-level tokenizers split characters over tokens and sentencepiece hangs meaning on the neighbours, so a token is
decoded as the difference that it makes behind the tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are not a character (yet)
WINDOW = 6  # tokens of left context: enough for any character (4 bytes) and for a leading space


class TextStream:
    """Text of a growing token list, piece by piece.

    A piece may be empty: the bytes of a character come out with the token that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        """`context`: the tokens before the first piece (the prompt)."""
        self._tokenizer = tokenizer
        self._window = list(context[-WINDOW:])
        self._shown = len(self._decode(self._window))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        """The text that is certain now and was not before `token`."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = len(text) - text.endswith(UNFINISHED)
        if certain < self._shown:  # a special token, or bytes still open
            return ""
        piece = text[self._shown : certain]
        self._shown = certain
        if len(self._window) > 4 * WINDOW and certain == len(text):
            self._window = self._window[-WINDOW:]
            self._shown = len(self._decode(self._window))
        return piece

    def rest(self) -> str:
        """What is still open at the end: bytes that never became a character."""
        text = self._decode(self._window)
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def fork(self) -> TextStream:
        """An independent copy, to spell out tokens that may not be kept."""
        copy = object.__new__(TextStream)
        copy._tokenizer, copy._window, copy._shown = self._tokenizer, list(self._window), self._shown
        return copy

    def peek(self, tokens: Iterable[int], parents: Iterable[int]) -> list[str]:
        """The piece of each node of a forest behind this text, in the context it was proposed in."""
        streams: list[TextStream] = []
        pieces = []
        for token, parent in zip(tokens, parents, strict=True):
            stream = (streams[parent] if parent >= 0 else self).fork()
            pieces.append(stream.push(token))
            streams.append(stream)
        return pieces
