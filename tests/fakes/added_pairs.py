"""Pairs with a random target of their own: complete, without drafter, absent, and not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.tiny_models import byte_level_tokenizer, save_model
from specdemo.models.zoo import PAIRS, Pair


def add_pairs(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Register the pairs; return their names."""
    target = str(save_model(folder / "target", byte_level_tokenizer()))
    added = {
        "both": Pair("both", target, target, 2),
        "alone": Pair("target without drafter", target, None, 2, method="nasd"),
        "absent": Pair("absent", str(folder / "absent"), None, 2, method="nasd"),
        "uninstalled": Pair("not installed", "", None, 2, wheel="some-wheel"),
    }
    for name, pair in added.items():
        patch.setitem(PAIRS, name, pair)
    return [*added]
