"""One text in the tokens of two vocabularies: a drafter's, which reads it, and a target's, which goes on with it.

Knows tokenizers; knows nothing of models or of drafting. What cannot be said in the other vocabulary (half a character,
a special token, a text that its tokenizer alters) is left out: a shorter draft, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from specdemo.core.errors import UserError
from specdemo.models.tokenizer import UNFINISHED, TextStream

TAIL = 16  # tokens at a text's end that are cut anew when it grows: what is added reaches a word or two back at most


class Bridge:
    """Serves one text, which only grows; a round costs the same however long the text has become."""

    def __init__(
        self, target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, opening: Sequence[int]
    ) -> None:
        """`opening`: the drafter's tokens that stand before any text. Raises `UserError` for tokenizers without offsets.

        Offsets tell which characters a token stands for.
        """
        for tokenizer in (target, drafter):
            if not tokenizer.is_fast:
                raise UserError(
                    f"{type(tokenizer).__name__} does not tell which characters a token stands for, so no text can be "
                    "carried over: choose two models with one tokenizer"
                )
        self._target, self._drafter = target, drafter
        self._special = frozenset(drafter.all_special_ids)
        self._stream: TextStream | None = None
        self._seen = 0  # tokens of the target's
        self._text = ""
        self._ids = list(opening)  # the text in the drafter's tokens,
        self._ends = [0] * len(self._ids)  # and the place in it where each of them ends

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The text of the target's `tokens` in the drafter's, a character that is not whole yet left out."""
        known = len(self._text)
        if self._stream is None:
            ends = range(len(tokens), max(0, len(tokens) - TAIL), -1)
            self._seen = next((n for n in ends if not _decode(self._target, tokens[:n]).endswith(UNFINISHED)), 0)
            self._text = _decode(self._target, tokens[: self._seen])
            self._stream = TextStream(self._target, tokens[: self._seen])
        self._text += "".join([self._stream.push(token) for token in tokens[self._seen :]])
        self._seen = len(tokens)
        if len(self._text) > known:
            self._recut()
        return self._ids

    def write(self, tokens: Sequence[int], new: Sequence[int]) -> list[int]:
        """The drafter's tokens `new`, behind what it read last, as tokens that go on from the target's `tokens`.

        Their text behind that of `tokens` is the text of `new`; empty where no such tokens are found.
        """
        said = self._said(new)
        if not said:
            return []
        tail = list(tokens[-TAIL:])
        known = next(n for n in range(len(tail), -1, -1) if self._text.endswith(_decode(self._target, tail[:n])))
        before, pending = _decode(self._target, tail[:known]), tail[known:]  # what is pending has begun a character
        # Cut together with the words before it, as the target itself would write it; alone where a token would reach
        # across: then the last committed one is a piece of a word, and the rest of the word follows it.
        for text, at in ((before + said, len(before)), (said, 0)):
            ids, spans = _cut(self._target, text)
            found = [token for token, (_, end) in zip(ids, spans, strict=True) if end > at]
            if found[: len(pending)] == pending:
                found = found[len(pending) :]
                if _decode(self._target, tail + found) == before + said:
                    return found
        return []

    def _recut(self) -> None:
        """Cut the end of the text anew, and go on from the first place where the old and the new tokens agree.

        A text that is cut from its middle may begin otherwise than the whole text stands there, by a space that some
        tokenizers put before any text or by half a word; a token later it does not.
        """
        first = max(0, len(self._ends) - TAIL)
        old = {end: i for i, end in enumerate(self._ends[first:], first + 1)}  # by place: how many tokens end there
        at = min(old, default=0)
        ids, spans = _cut(self._drafter, self._text[at:])
        ends = [at + end for _, end in spans]
        new = {end: i for i, end in enumerate(ends, 1)}
        agreed = min((end for end in new if end in old and end > at), default=at)
        kept, fresh = old.get(agreed, 0), new.get(agreed, 0)
        self._ids[kept:], self._ends[kept:] = ids[fresh:], ends[fresh:]

    def _said(self, new: Sequence[int]) -> str:
        """What the drafter's `new` tokens add to the text, up to a special token or a character that is not whole."""
        plain = next((i for i, token in enumerate(new) if token in self._special), len(new))
        tail = self._ids[-TAIL:]
        before, after = (_decode(self._drafter, ids) for ids in (tail, [*tail, *new[:plain]]))
        return after[len(before) :].partition(UNFINISHED)[0] if after.startswith(before) else ""


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _cut(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of `text`, and the characters that each one stands for, from and to."""
    cut = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return cut["input_ids"], cut["offset_mapping"]
