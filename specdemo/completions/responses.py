"""Responses in the formats of OpenAI: complete objects, and chunks of a stream."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from uuid import uuid4

from specdemo import __version__
from specdemo.completions.answer import Answer, AnswerPart, AnswerToken
from specdemo.completions.requests import CompletionRequest
from specdemo.models.tokenizer import UNFINISHED, TokenBytes

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"


def event_line(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


@dataclass
class ResponseFormat(ABC):
    """Response to a request; `stem` begins its id, `whole` and `part` are the types of object and chunk."""

    stem = whole = part = ""

    request: CompletionRequest
    engine: str
    texts: TokenBytes
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _offset: int = 0  # characters of listed tokens
    _sent: int = 0  # ids in chunks

    def complete(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the response of a request, with an answer per prompt."""
        choices = []
        for i, answer in enumerate(answers):
            self._offset = 0
            choices.append(self._choice(i, answer, answer.token_ids, answer.finish_reason))
        response = {**self._envelope(self.whole, choices), **self.figures(answers)}
        if self.request.return_token_ids and len(answers) == 1:
            response["prompt_token_ids"] = list(answers[0].header.prompt_tokens)
        return response

    def chunk(self, part: AnswerPart, answer: Answer) -> dict[str, Any]:
        """Return the chunk of `part`, with the ids of `answer` that no chunk contained."""
        choice = self._choice(0, part, answer.token_ids[self._sent :], answer.finish_reason)
        self._sent = len(answer.token_ids)
        listed = [{"token": token.text, "outcome": token.outcome.value} for token in part.tokens if token.outcome]
        if listed and self.request.stream_options.speculation:
            choice["speculation"] = listed
        return self._envelope(self.part, [choice])

    def usage(self, answer: Answer) -> dict[str, Any]:
        """Return the last chunk."""
        ledger = {"ledger": answer.ledger()} if self.request.stream_options.speculation else {}
        return {**self._envelope(self.part, []), **self.figures([answer]), **ledger}

    def figures(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the counts of answers, which have the same `DraftCounts`."""
        headers = [answer.header for answer in answers]
        prompt = sum(len(header.prompt_tokens) for header in headers)
        new = sum(answer.metrics.tokens for answer in answers)
        cached = sum(min(header.cached_tokens, len(header.prompt_tokens)) for header in headers)
        counts = answers[0].counts
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": counts.usage(self.request.prediction is not None),
        }
        return {"usage": usage, "metrics": {"speculative_decoding": counts.statistics(headers[0].recipe["gamma"])}}

    def first(self) -> list[dict[str, Any]]:
        return []

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.stem}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": f"specdemo-{__version__}-{self.engine}",
            "choices": choices,
        }

    def _choice(
        self, index: int, shown: Answer | AnswerPart, ids: Sequence[int], finish_reason: str | None
    ) -> dict[str, Any]:
        token_ids = {"token_ids": list(ids)} if self.request.return_token_ids else {}
        return {"index": index, **self._content(shown), "finish_reason": finish_reason, **token_ids}

    def _texts(self, token: AnswerToken) -> dict[int, str]:
        """Return the texts of a token and its alternatives; that of the token is what the answer shows."""
        top = token.logprob.top if token.logprob else ()
        return {other: self.texts.text(other) for other, _ in top} | {token.token: token.text}

    @abstractmethod
    def _content(self, shown: Answer | AnswerPart) -> dict[str, Any]:
        """Return text and log-probabilities of an answer, or of a part for a chunk."""


class ChatFormat(ResponseFormat):
    """Chat completions."""

    stem = "chatcmpl"
    whole, part = "chat.completion", "chat.completion.chunk"

    def first(self) -> list[dict[str, Any]]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._envelope(self.part, [choice])]

    def _content(self, shown: Answer | AnswerPart) -> dict[str, Any]:
        logprobs = {"logprobs": self._logprobs(shown.tokens)}
        if isinstance(shown, Answer):
            return {"message": {"role": "assistant", "content": shown.text, "refusal": None}, **logprobs}
        return {"delta": {"content": shown.text} if shown.text or shown.tokens else {}, **logprobs}

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        entries = []
        for token in tokens:
            if token.logprob is not None:
                texts = self._texts(token)
                top = [self._entry(other, texts[other], logprob) for other, logprob in token.logprob.top]
                entries.append(self._entry(token.token, token.text, token.logprob.logprob) | {"top_logprobs": top})
        return {"content": entries, "refusal": None} if entries else None

    def _entry(self, token: int, text: str, logprob: float) -> dict[str, Any]:
        own = self.texts.of(token)
        partial = UNFINISHED in own.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(own if partial else text.encode())}


class TextFormat(ResponseFormat):
    """Text completions."""

    stem = "cmpl"
    whole = part = "text_completion"

    def _content(self, shown: Answer | AnswerPart) -> dict[str, Any]:
        return {"text": shown.text, "logprobs": self._logprobs(shown.tokens)}

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if not tokens or self.request.alternatives is None:
            return None
        starts = [*accumulate((len(token.text) for token in tokens), initial=self._offset)]
        self._offset = starts.pop()
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob and token.logprob.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": starts,
        }

    def _top(self, token: AnswerToken) -> dict[str, float] | None:
        """Return the log-probabilities of the alternatives and of the token itself."""
        if token.logprob is None:
            return None
        texts, ascending = self._texts(token), token.logprob.top[::-1]  # the larger value of equal texts is last
        return {texts[other]: value for other, value in (*ascending, (token.token, token.logprob.logprob))}
