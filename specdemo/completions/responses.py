"""Answers of runs, and their responses in the formats of OpenAI: complete objects, and chunks of a stream."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any
from uuid import uuid4

from specdemo import __version__
from specdemo.completions.requests import CompletionRequest
from specdemo.core.events import End, Event, Header, PromptScores, StepEvent
from specdemo.core.ledger import Ledger, one_row_seconds
from specdemo.core.metrics import Metrics
from specdemo.core.step import Outcome, Step, TokenLogprob
from specdemo.drafters.suffix import PREDICTED
from specdemo.models.tokenizer import UNFINISHED, TokenBytes

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"


@dataclass(frozen=True)
class AnswerToken:
    """Token with its text, as far as the answer shows it, and log-probabilities; None for the first of a prompt.

    Tokens of a prompt have no outcome.
    """

    token: int
    text: str
    logprob: TokenLogprob | None
    outcome: Outcome | None = None


@dataclass
class DraftCounts:
    """Drafted and accepted tokens of each step with a draft."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: int = 0  # tokens of these steps
    predicted: int = 0  # drafted from the prediction
    predicted_accepted: int = 0

    def add(self, step: Step) -> None:
        if not step.draft.tokens:
            return
        self.drafted.append(len(step.draft))
        self.accepted.append(step.accepted)
        self.emitted += len(step.tokens)
        copied = [node for node, origin in enumerate(step.draft.origin) if origin.source == PREDICTED]
        self.predicted += len(copied)
        self.predicted_accepted += sum(node in step.verdict.accepted for node in copied)

    def usage(self, predicted: bool) -> dict[str, int]:
        """Return OpenAI's counts: tokens of the prediction, or all drafted tokens without a prediction."""
        drafted = self.predicted if predicted else sum(self.drafted)
        accepted = self.predicted_accepted if predicted else sum(self.accepted)
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}

    def statistics(self, gamma: int) -> dict[str, Any]:
        """Return counts per step with the names of vLLM; ratios without a denominator are null."""
        steps = len(self.drafted)
        drafted, accepted = sum(self.drafted), sum(self.accepted)
        longest = max([gamma, *self.accepted])
        return {
            "mean_acceptance_length": self.emitted / steps if steps else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_histogram": [self.accepted.count(n) for n in range(longest + 1)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": gamma,
            "per_step_accepted": self.accepted,
            "per_step_drafted": self.drafted,
        }


@dataclass(frozen=True)
class AnswerPart:
    """Text and tokens added by an event."""

    text: str
    tokens: Sequence[AnswerToken]


@dataclass
class Answer:
    """Answer of a run so far.

    Tokens with log-probabilities, with `provenance` all, are listed when their text is shown. The end token and tokens
    of a stop text are listed without text, so the listed texts are the answer.
    """

    echo: bool = False  # the answer begins with the prompt
    counts: DraftCounts = field(default_factory=DraftCounts)
    provenance: bool = False
    steps: list[Step] = field(default_factory=list)  # with `provenance`
    header: Header = field(init=False)
    text: str = ""
    tokens: list[AnswerToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # including the stop token
    metrics: Metrics = Metrics()
    finish_reason: str | None = None
    _undecided: deque[AnswerToken] = field(default_factory=deque)  # a stop text may cut their texts
    _listed: int = 0  # characters of `tokens`

    def add(self, event: Event) -> AnswerPart:
        shown, listed = len(self.text), len(self.tokens)
        match event:
            case Header():
                self.header = event
                self.text = event.prompt if self.echo else ""
                self._listed = len(self.text)
            case PromptScores():
                self.tokens += map(AnswerToken, self.header.prompt_tokens, event.texts, event.logprobs)
            case StepEvent():
                self.counts.add(event.step)
                self.text += event.text
                self.token_ids += event.step.tokens
                self.metrics = event.metrics
                written = event.written or event.pieces
                logprobs: Sequence[TokenLogprob | None] = event.step.verdict.logprobs
                if self.provenance:
                    self.steps.append(event.step)
                    logprobs = logprobs or [None] * len(event.step.tokens)
                outcomes = [token.outcome for token in event.shown() if token.outcome.committed]
                self._undecided += map(AnswerToken, event.step.tokens, written, logprobs, outcomes)
                self._list()
            case End():
                self.finish_reason, self.metrics = event.reason, event.metrics
                self._list(last=True)
        return AnswerPart(self.text[shown:], self.tokens[listed:])

    def ledger(self) -> dict[str, Any]:
        """Return seconds and share of each cause of the wall time, with `provenance`."""
        ledger = Ledger.of(self.steps, one_row_seconds(self.steps, self.header.environment))
        if ledger is None:
            return {}
        return {
            part.cause.name.lower(): {"seconds": part.seconds, "share": ledger.share(part.cause)}
            for part in ledger.entries
        }

    def _list(self, last: bool = False) -> None:
        while self._undecided:
            token, free = self._undecided[0], len(self.text) - self._listed
            if len(token.text) > free and not last:
                return
            self.tokens.append(replace(token, text=token.text[:free]))
            self._listed += len(self.tokens[-1].text)
            self._undecided.popleft()


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
