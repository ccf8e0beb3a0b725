"""Data of steps for the browser."""

from __future__ import annotations

import pytest

from specdemo.ui import step_views


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_step_player_does_not_change_decisions_of_lenient_rules(temperature: float) -> None:
    """Its bounds have no threshold."""
    assert step_views.decided_by({"rule": "lenient", "temperature": temperature}) == "none"
    assert step_views.decided_by({"rule": "rejection", "temperature": 0.7}) == "draw"
