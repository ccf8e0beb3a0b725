"""Simulation of edges and replicas: closed forms for one edge, for saturation and for a lost service."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("simpy", reason="simpy cannot be installed here")

from benchmarks.fleet_model import WARM_UP_S, Fleet, Simulation

pytestmark = pytest.mark.slow

STEP = [(4, 2)]  # draft tokens, committed tokens
FLEET = Fleet(0.01, 0.002, 0.003, (0.005, 0.001), 1e-6, STEP, rtt_s=0.02, length=100_000)
TEXT_S = 0.003


def test_one_edge_alternates_with_its_service() -> None:
    """Texts are cached at the start."""
    simulation = Simulation.of(FLEET, 100.0)
    step_s = 0.01 + 0.02 + 0.002 + 0.005 + (4 + 2) * 0.001 + TEXT_S  # two committed tokens are unread
    assert simulation.durations == pytest.approx([step_s] * len(simulation.durations))
    assert simulation.tokens == pytest.approx(2 * 100.0 / step_s, abs=4)


def test_a_saturated_service_has_the_throughput_of_its_device() -> None:
    """A pass takes 5 ms, and 1 ms per row."""
    alone = Simulation.of(replace(FLEET, edges=100, texts=1), 50.0)
    assert alone.tokens == pytest.approx(2 * 50.0 / (0.005 + 6 * 0.001 + TEXT_S), rel=0.2)
    shared = Simulation.of(replace(FLEET, edges=100), 50.0)
    assert alone.tokens < shared.tokens < 2 * 50.0 / (6 * 0.001)


def test_a_lost_service_costs_its_time_and_affinity_changes_nothing_for_one() -> None:
    base = Simulation.of(FLEET, 50.0)
    lost = Simulation.of(replace(FLEET, lost_at_s=10.0, replaced_s=20.0), 50.0)
    assert lost.tokens == pytest.approx(base.tokens * 30 / 50, rel=0.03)
    assert Simulation.of(replace(FLEET, affinity=False), 50.0).tokens == base.tokens
    assert WARM_UP_S > FLEET.rtt_s
