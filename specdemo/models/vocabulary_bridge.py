"""Re-encode text between the vocabularies of a drafter and a target.

Incomplete characters, special tokens and text altered by the tokenizer are dropped, which shortens the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from specdemo.core.errors import UserError
from specdemo.models.tokenizer import UNFINISHED, TextStream

TAIL = 16  # tokens re-encoded when the text grows


class Bridge:
    """Bridge for a growing text, at constant cost per step."""

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
        self._ends = [0] * len(self._ids)  # character after each token

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
        before, pending = _decode(self._target, tail[:known]), tail[known:]  # pending: start of a character
        # Together with the preceding words, as the target would; separately if a token would span the boundary.
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
        old = {end: i for i, end in enumerate(self._ends[first:], first + 1)}  # text position -> tokens up to it
        start = min(old, default=0)
        ids, spans = _encode(self._drafter, self._text[start:])
        ends = [start + end for _, end in spans]
        new = {end: i for i, end in enumerate(ends, 1)}
        agreed = min((end for end in new if end in old and end > start), default=start)
        old_count, new_count = old.get(agreed, 0), new.get(agreed, 0)
        self._ids[old_count:], self._ends[old_count:] = ids[new_count:], ends[new_count:]

    def _text_of(self, new: Sequence[int]) -> str:
        """Decode drafter tokens up to the first special token or incomplete character."""
        count = next((i for i, token in enumerate(new) if token in self._special), len(new))
        tail = self._ids[-TAIL:]
        before, after = (_decode(self._drafter, ids) for ids in (tail, [*tail, *new[:count]]))
        return after[len(before) :].partition(UNFINISHED)[0] if after.startswith(before) else ""


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoding["input_ids"], encoding["offset_mapping"]
