"""Responses in the formats of OpenAI: complete objects, and chunks of a stream."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdemo import __version__
from specdemo.completions.answer import Answer, AnswerToken
from specdemo.models.tokenizer import UNFINISHED, TokenBytes

DONE = b"data: [DONE]\n\n"


def event_line(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


@dataclass
class ResponseFormat(ABC):
    """Format of a response; `stem` names its id, `whole` and `part` are the types of object and chunk."""

    stem = whole = part = ""

    id: str
    created: int
    model: str
    engine: str
    predicted: bool
    texts: TokenBytes
    token_ids: bool
    _offset: int = 0  # characters sent before the next token
    _withheld: int = 0  # further characters before it
    _unfinished: bool = False  # bytes of a character are pending

    def complete(self, answer: Answer) -> dict[str, Any]:
        choice = {"index": 0, **self._complete(answer), "finish_reason": answer.finish_reason}
        ids = {"prompt_token_ids": list(answer.prompt_tokens)} if self.token_ids else {}
        return {**self._envelope(self.whole, [choice | self._ids(answer.token_ids)]), **ids, **self.figures(answer)}

    def chunk(self, new: Sequence[AnswerToken], ids: Sequence[int]) -> dict[str, Any]:
        choice = {"index": 0, **self._delta("".join(token.piece for token in new), new), "finish_reason": None}
        return self._envelope(self.part, [choice | self._ids(ids)])

    def last(self, answer: Answer, ids: Sequence[int]) -> dict[str, Any]:
        choice = {"index": 0, **self._delta("", ()), "finish_reason": answer.finish_reason}
        return self._envelope(self.part, [choice | self._ids(ids)])

    def usage(self, answer: Answer) -> dict[str, Any]:
        return {**self._envelope(self.part, []), **self.figures(answer)}

    def figures(self, answer: Answer) -> dict[str, Any]:
        prompt, new = len(answer.prompt_tokens), answer.metrics.tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": min(answer.cached_tokens, prompt)},
            "completion_tokens_details": answer.counts.usage(self.predicted),
        }
        return {"usage": usage, "metrics": {"speculative_decoding": answer.counts.statistics(answer.gamma)}}

    def first(self) -> list[dict[str, Any]]:
        return []

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        fingerprint = f"specdemo-{__version__}-{self.engine}"
        return {
            "id": f"{self.stem}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint,
            "choices": choices,
        }

    def _ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self.token_ids else {}

    @abstractmethod
    def _complete(self, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, text: str, tokens: Sequence[AnswerToken]) -> dict[str, Any]: ...


class ChatFormat(ResponseFormat):
    """Chat completions."""

    stem = "chatcmpl"
    whole, part = "chat.completion", "chat.completion.chunk"

    def first(self) -> list[dict[str, Any]]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._envelope(self.part, [choice])]

    def _complete(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(answer.tokens)}

    def _delta(self, text: str, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        return {"delta": {"content": text} if tokens else {}, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        entries = []
        for token in tokens:
            if token.logprob is not None:
                top = [self._entry(other, logprob) for other, logprob in token.logprob.top]
                entries.append(self._entry(token.token, token.logprob.logprob) | {"top_logprobs": top})
        return {"content": entries, "refusal": None} if entries else None

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.texts.text(token), "logprob": logprob, "bytes": list(self.texts.of(token))}


class TextFormat(ResponseFormat):
    """Text completions."""

    stem = "cmpl"
    whole = part = "text_completion"

    def _complete(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text, "logprobs": self._logprobs(answer.tokens)}

    def _delta(self, text: str, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        known = [(token, token.logprob) for token in tokens if token.logprob is not None]
        if not known:
            return None
        return {
            "tokens": [self.texts.text(token.token) for token, _ in known],
            "token_logprobs": [logprob.logprob for _, logprob in known],
            "top_logprobs": [{self.texts.text(t): value for t, value in logprob.top} for _, logprob in known],
            "text_offset": [self._start(token) for token, _ in known],
        }

    def _start(self, token: AnswerToken) -> int:
        """Return the index of the first character of the next token, whose text may be withheld."""
        text, first = self.texts.text(token.token), self._offset + self._withheld
        self._offset += len(token.piece)
        if self._unfinished and token.piece and token.piece.endswith(text):
            first, self._unfinished = self._offset - len(text), False
            self._withheld = 0
        elif UNFINISHED in text:
            self._unfinished = True
        else:
            self._withheld = max(0, self._withheld + len(text) - len(token.piece))
        return first


def error_body(message: str, kind: str, code: str, parameter: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}
