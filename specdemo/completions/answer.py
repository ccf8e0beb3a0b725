"""Fold the events of a run into the text, tokens and counts of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdemo.core.events import End, Event, Header, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.step import Step, TokenLogprob
from specdemo.drafters.prediction import PREDICTED


@dataclass(frozen=True)
class AnswerToken:
    """Token of an answer with its text and, if requested, log-probabilities."""

    token: int
    piece: str
    logprob: TokenLogprob | None


@dataclass
class DraftCounts:
    """Drafted and accepted tokens of each step with a draft."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    predicted: int = 0  # drafted from the prediction
    predicted_accepted: int = 0

    def add(self, step: Step) -> None:
        if not step.draft.tokens:
            return
        self.drafted.append(len(step.draft))
        self.accepted.append(step.accepted)
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
            "mean_acceptance_length": 1 + accepted / steps if steps else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_histogram": [self.accepted.count(n) for n in range(longest + 1)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": gamma,
            "per_step_accepted": self.accepted,
            "per_step_drafted": self.drafted,
        }


@dataclass
class Answer:
    """Answer of a run so far."""

    stop: frozenset[int]  # tokens without text in the answer, which end it
    text: str = ""
    tokens: list[AnswerToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # including the stop token
    prompt_tokens: Sequence[int] = ()
    cached_tokens: int = 0
    gamma: int = 0
    counts: DraftCounts = field(default_factory=DraftCounts)
    metrics: Metrics = Metrics()
    finish_reason: str | None = None

    def add(self, event: Event) -> list[AnswerToken]:
        new: list[AnswerToken] = []
        match event:
            case Header():
                self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
                self.gamma = event.recipe["gamma"]
            case StepEvent():
                self.counts.add(event.step)
                new = self._new(event)
                self.token_ids += event.step.tokens
                self.metrics = event.metrics
            case End():
                self.finish_reason, self.metrics = event.reason, event.metrics
        self.tokens += new
        self.text += "".join(token.piece for token in new)
        return new

    def _new(self, event: StepEvent) -> list[AnswerToken]:
        logprobs = event.step.verdict.logprobs or [None] * len(event.step.tokens)
        return [
            AnswerToken(token, piece, logprob)
            for token, piece, logprob in zip(event.step.tokens, event.pieces, logprobs, strict=False)
            if piece or token not in self.stop
        ]
