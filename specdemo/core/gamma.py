"""Draft-length policies: may this draft grow?

Knows steps and raw draft logits; knows nothing of models, text or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdemo.core.step import Step


@dataclass
class Fixed:
    """Always gamma tokens (Leviathan et al. 2211.17192, Algorithm 1)."""

    gamma: int

    def more(self, n: int, logits: Any) -> bool:
        """Up to gamma."""
        return n < self.gamma

    def observe(self, step: Step) -> None:
        """Nothing to learn."""
