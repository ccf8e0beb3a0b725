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
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        ids = (
            {"prompt_token_ids": list(answers[0].prompt_tokens)}
            if self.request.return_token_ids and len(answers) == 1
            else {}
        )
        return {**self._envelope(self.whole, choices), **ids, **self.figures(answers)}

    def chunk(self, part: AnswerPart, answer: Answer) -> dict[str, Any]:
        """Return the chunk of `part`, with the ids of `answer` that no chunk contained."""
        choice = {"index": 0, **self._delta(part), "finish_reason": answer.finish_reason}
        ids = self._ids(answer.token_ids[self._sent :])
        self._sent = len(answer.token_ids)
        return self._envelope(self.part, [choice | ids | self._outcomes(part.tokens)])

    def usage(self, answer: Answer) -> dict[str, Any]:
        """Return the last chunk."""
        ledger = {"ledger": answer.ledger()} if self.request.stream_options.speculation else {}
        return {**self._envelope(self.part, []), **self.figures([answer]), **ledger}

    def figures(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the counts of answers, which have the same `DraftCounts`."""
        prompt = sum(len(answer.prompt_tokens) for answer in answers)
        new = sum(answer.metrics.tokens for answer in answers)
        cached = sum(min(answer.cached_tokens, len(answer.prompt_tokens)) for answer in answers)
        counts, gamma = answers[0].counts, answers[0].gamma
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": counts.usage(self.request.prediction is not None),
        }
        return {"usage": usage, "metrics": {"speculative_decoding": counts.statistics(gamma)}}

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

    def _ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self.request.return_token_ids else {}

    def _outcomes(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        listed = [{"token": token.text, "outcome": token.outcome.value} for token in tokens if token.outcome]
        return {"speculation": listed} if listed and self.request.stream_options.speculation else {}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        self._offset = 0
        choice = {"index": index, **self._complete(answer), "finish_reason": answer.finish_reason}
        return choice | self._ids(answer.token_ids)

    def _texts(self, token: AnswerToken) -> dict[int, str]:
        """Return the texts of a token and its alternatives; that of the token is what the answer shows."""
        top = token.logprob.top if token.logprob else ()
        return {other: self.texts.text(other) for other, _ in top} | {token.token: token.text}

    @abstractmethod
    def _complete(self, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, part: AnswerPart) -> dict[str, Any]: ...


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

    def _delta(self, part: AnswerPart) -> dict[str, Any]:
        shown = {"content": part.text} if part.text or part.tokens else {}
        return {"delta": shown, "logprobs": self._logprobs(part.tokens)}

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

    def _complete(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text, "logprobs": self._logprobs(answer.tokens)}

    def _delta(self, part: AnswerPart) -> dict[str, Any]:
        return {"text": part.text, "logprobs": self._logprobs(part.tokens)}

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
