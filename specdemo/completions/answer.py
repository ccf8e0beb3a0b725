"""Fold the events of a run into the text, tokens and counts of an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdemo.core.events import End, Event, Header, PromptScores, StepEvent
from specdemo.core.ledger import Ledger, one_row_seconds
from specdemo.core.metrics import Metrics
from specdemo.core.step import Outcome, Step, TokenLogprob
from specdemo.drafters.suffix import PREDICTED


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
