"""Draft lengths while texts share passes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from specdemo.core.decode import DraftLengthPolicy
from specdemo.core.policies import CostModel, PositionAcceptance
from specdemo.core.step import Step
from specdemo.shared_passes import SharedPassRecord

_PRIOR_WEIGHT = 4.0
_RETRY_AFTER = 16  # steps without drafts


@dataclass
class BatchLimit:
    """Limit the drafts of `policy` while t texts share a pass.

    A draft token costs (r + c) / ((1 - r) / t + r + b) AR tokens (r: row, c: drafting, b: work between passes); `gamma`
    and `path_limits` exclude tokens whose acceptance is less probable, `may_extend` does not.
    """

    policy: DraftLengthPolicy
    costs: CostModel
    load: Callable[[], SharedPassRecord | None]
    longest: int

    def __post_init__(self) -> None:
        self._acceptance = PositionAcceptance(self.longest, weight=_PRIOR_WEIGHT)
        self._idle = 0

    @property
    def needs_logits(self) -> bool:
        return self.policy.needs_logits

    @property
    def notes(self) -> Mapping[str, float]:
        load = self.load()
        return self.policy.notes if load is None else {**self.policy.notes, "texts": float(load.texts)}

    @property
    def path_limits(self) -> Sequence[float] | None:
        limits, cost = self.policy.path_limits, self._token_cost
        return None if limits is None else [max(limit, cost) for limit in limits]

    @property
    def gamma(self) -> int:
        if not (cost := self._token_cost):
            return self.policy.gamma
        paths = accumulate(self._acceptance.rates, operator.mul)
        length = max(sum(path >= cost for path in paths), int(self._idle >= _RETRY_AFTER))
        return min(self.policy.gamma, length)

    @property
    def _token_cost(self) -> float:
        if (load := self.load()) is None:
            return 0.0
        row = self.costs.row
        single_s = load.seconds / (1 + (load.rows - 1) * row)
        between = load.between_s / max(single_s, 1e-9)
        return (row + self.costs.token) / ((1 - row + between) / load.texts + row)

    def may_extend(self, n: int, logits: Any) -> bool:
        return self.policy.may_extend(n, logits)

    def observe(self, step: Step) -> None:
        self._idle = 0 if step.draft.tokens else self._idle + 1
        self._acceptance.observe(step)
        self.policy.observe(step)
