"""Predicted outputs: draft from a text that the answer probably repeats, such as the file that is edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.step import Draft, Origin, Step
from specdemo.drafters.suffix import SuffixDrafter

PREDICTED = "prediction"  # source of tokens that were copied from the prediction
LONGEST_COPY = 15  # tokens of a draft; with the token of the target 16 rows
_ANCHOR = 16  # tokens of the prompt that precede the prediction, so that drafts begin with the answer
_TRUSTED = 2  # matched tokens from which the prediction drafts


@dataclass(frozen=True)
class PredictedText:
    """Prediction in tokens, after a prompt."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    fallback_gamma: int  # longest draft of the method's drafter


class PredictionDrafter:
    """Continue the prediction after the last matching tokens; without a match `fallback` drafts."""

    def __init__(self, prediction: PredictedText, fallback: Drafter) -> None:
        self._start = max(0, len(prediction.prompt) - _ANCHOR)
        self._suffixes = _PredictionSuffixes([*prediction.prompt[self._start :], *prediction.tokens], self._start)
        self._fallback, self._fallback_gamma = fallback, prediction.fallback_gamma

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        answer = tokens[self._start :]
        if self._suffixes.match(answer) >= _TRUSTED and (draft := self._suffixes.propose(answer, budget)):
            return draft
        return self._fallback.propose(tokens, budget.at_most(self._fallback_gamma))

    @property
    def store_bytes(self) -> int:
        return self._suffixes.store_bytes + getattr(self._fallback, "store_bytes", 0)

    def observe(self, step: Step) -> None:
        self._fallback.observe(step)


class _PredictionSuffixes(SuffixDrafter):
    """Suffixes of prediction and answer; positions count from the start of the text."""

    def __init__(self, text: Sequence[int], offset: int) -> None:
        super().__init__(source=text)
        self._offset = offset

    def _origin(self, i: int) -> Origin:
        origin = super()._origin(i)
        if origin.position is None:
            return replace(origin, source=PREDICTED)
        return replace(origin, position=origin.position + self._offset)
