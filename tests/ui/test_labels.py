"""Advice after a slow run, and the meaning of alpha on the page."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.trace_records import PREFILL, absorb, end, header, step

from specdemo.ui.frames import Run
from specdemo.ui.labels import tiles, verdict
from specdemo.ui.lane import PLAIN, SPEC

AR_S = 0.01
PLAIN_STEPS = [step(i, pieces=["x"], draft_s=0.0, verify_s=AR_S) for i in range(1, 9)]


def words_after(
    beta: float, draft_s: float, verify_s: float, accepted: int = 1, gamma: int = 4, **recipe: Any
) -> tuple[str, str]:
    """Verdict and acceptance note after steps of `gamma` drafts; seconds are per step, AR steps take `AR_S`."""
    run, draft = Run((SPEC, PLAIN)), tuple("abcdefgh"[:gamma])
    made = header()
    made["recipe"] = made["recipe"] | {"gamma": gamma, "rule": "rejection", "policy": "fixed"} | recipe
    tested = min(accepted + 1, gamma)
    more = {"beta": [beta] * tested + [None] * (gamma - tested), "draft_s": draft_s, "verify_s": verify_s}
    pieces, path = ["x"] * (accepted + 1), tuple(range(accepted))
    drafted = [step(i, pieces=pieces, draft=draft, accepted=path, tested=tested, **more) for i in range(1, 9)]
    absorb(run, SPEC, made, PREFILL, *drafted, end())
    absorb(run, PLAIN, header("ar"), PREFILL, *PLAIN_STEPS, end())
    run.finish()
    return verdict(run.lanes), tiles(run.lanes)["acceptance"][1]


@pytest.mark.parametrize(
    ("figures", "recipe", "advice"),
    [
        (
            (0.3, 0.02, 0.01),
            {},
            "Acceptance (mean overlap β 0.30) does not exceed c 0.50: confirm with Repeat, then disable",
        ),
        ((0.4, 0.004, 0.022), {}, "No draft length pays at these costs of verification and host"),
        ((0.5, 0.008, 0.014), {"gamma": 8}, "By the cost model γ 2 reaches"),
        (
            (0.3, 0.02, 0.01),
            {"method": "tree"},
            "lower “Nodes per draft”, or confirm with Repeat and disable",
        ),
        ((0.3, 0.0, 0.03), {"method": "lookahead"}, "lower “Window, positions” or “Order n”"),
    ],
)
def test_advice_names_a_change_that_helps(figures: tuple, recipe: dict, advice: str) -> None:
    words, _ = words_after(*figures, **recipe)
    assert words.startswith("In this one run, speculation lost") and advice in words
    assert "shorter draft" not in words


def test_alpha_is_accepted_over_tested_on_the_whole_page() -> None:
    """Half of the tested tokens are accepted; the mean of sum min(p, q) is 0.6."""
    words, note = words_after(0.6, 0.001, 0.01)
    assert note == "8 of 32 drafted · α 0.50 · mean overlap β 0.60" and "With mean overlap β 0.60," in words
    words, note = words_after(0.6, 0.001, 0.01, rule="match")
    assert note == "8 of 32 drafted · α 0.50" and "With α 0.50," in words
    assert "β" not in words + note
    words, note = words_after(0.6, 0.001, 0.01, rule="block")
    assert note == "8 of 32 drafted · mean overlap β 0.60" and "α" not in words
