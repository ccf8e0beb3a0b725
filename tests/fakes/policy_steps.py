"""Steps that policies observe, and the lengths of drafts with constant logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from specdemo.core.origin import Origin
from specdemo.core.policies import POLICIES, CostModel, DraftLengths, PathProbability
from specdemo.core.step import Draft, Step, Verdict

FLAT = torch.zeros(16)
SURE = torch.tensor([30.0] + [0.0] * 15)


def step(drafted: int, accepted: int, draft_s: float = 0.0, verify_s: float = 1.0, i: int = 1) -> Step:
    draft = Draft.chain((7,) * drafted)
    verdict = Verdict(tuple(range(accepted)), 1)
    return Step(i, (1,), draft, verdict, drafted, draft_s=draft_s, verify_s=verify_s, host_s=0.0, t=0.0)


def tree_step(depth: int, accepted: int, draft_s: float = 0.0, verify_s: float = 1.0, width: int = 4) -> Step:
    """Return a step with `width` nodes per level, the children of the first node of the last level."""
    parents = tuple(width * (level - 1) if level else -1 for level in range(depth) for _ in range(width))
    verdict = Verdict(tuple(width * level for level in range(accepted)), 1)
    draft = Draft((7,) * len(parents), parents, origin=(Origin("model"),) * len(parents))
    return Step(1, (1,), draft, verdict, depth, draft_s=draft_s, verify_s=verify_s, host_s=0.0, t=0.0)


def length(policy: Any, logits: torch.Tensor | None = None) -> int:
    """Draft length if every token has these logits."""
    n = 0
    while policy.may_extend(n, None) and policy.may_extend(n, logits):
        n += 1
        assert n < 100
    return n


def by_path(five: float) -> PathProbability:
    """Return the policy for a cost of five rows, in passes of one."""
    return POLICIES["path"].make(DraftLengths(4, 0, 4), CostModel({1: 1.0, 5: five}, 0.1))


def sourced(source: str | None, drafted: int, accepted: int, seconds: float = 1.0) -> Step:
    plain = step(drafted, accepted, verify_s=seconds)
    return replace(plain, draft=replace(plain.draft, origin=(Origin(source),) * drafted))
