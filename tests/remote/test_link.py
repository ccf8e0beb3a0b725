"""The wire as an edge sees it: what is counted, delayed, slowed down and lost; the closed forms with a round trip."""

from __future__ import annotations

from typing import Any

import httpcore
import pytest

from benchmarks.cloud import Rounds
from benchmarks.link import Cell, gamma_for
from specdemo.core.theory import best_gamma, best_gamma_over, speedup_over, walltime_improvement
from specdemo.remote.link import LinkEmulation, MeteredNetwork


class Echo(httpcore.NetworkStream):
    """Gives back, 10 bytes at a time, as much as was written."""

    def __init__(self) -> None:
        self.heard = 0

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.heard += len(buffer)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return b"x" * 10

    def close(self) -> None: ...


class Backend(httpcore.NetworkBackend):
    def connect_tcp(self, *args: Any, **options: Any) -> Echo:
        self.stream = Echo()
        return self.stream


def wire(**link: Any) -> tuple[MeteredNetwork, httpcore.NetworkStream, Echo, list[float]]:
    now, inner = [0.0], Backend()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    made = MeteredNetwork(LinkEmulation(**link), sleep, lambda: now[0], inner)
    return made, made.connect_tcp("cloud", 1), inner.stream, now


def test_every_byte_is_counted_and_a_round_trip_takes_what_it_should() -> None:
    made, stream, _, now = wire(rtt_s=0.1)
    assert now[0] == pytest.approx(0.1)  # the handshake
    stream.write(b"a" * 30)
    stream.write(b"b" * 5)
    assert stream.read(100) + stream.read(100) == b"x" * 20
    assert (made.tally.up, made.tally.down) == (35, 20) and now[0] == pytest.approx(0.2)


def test_bandwidth_takes_its_time() -> None:
    _, stream, _, now = wire(up_bps=8_000, down_bps=800)
    stream.write(b"a" * 500)
    assert now[0] == pytest.approx(0.5)
    stream.read(100)
    assert now[0] == pytest.approx(0.6)


def test_jitter_is_seeded_and_within_bounds() -> None:
    def times(seed: int) -> list[float]:
        _, stream, _, now = wire(jitter_s=0.1, seed=seed)
        seen = []
        for _ in range(20):
            stream.write(b"a")
            stream.read(10)
            seen.append(now[0])
        return [b - a for a, b in zip(seen, seen[1:], strict=False)]

    assert times(1) == times(1) != times(2)
    assert all(0 <= one <= 0.2 for one in times(1)) and len(set(times(1))) > 10


def test_what_is_lost_is_waited_for_in_vain() -> None:
    """Each way 0.3 of the messages: 0.51 of the exchanges fail, and time out exactly."""
    failed = reached = 0
    for seed in range(400):
        _, stream, inner, now = wire(loss=0.3, seed=seed)
        stream.write(b"a" * 7)
        try:
            stream.read(10, timeout=0.4)
        except httpcore.ReadTimeout:
            failed += 1
            assert now[0] == pytest.approx(0.4)
        reached += inner.heard > 0
    assert 0.41 < failed / 400 < 0.61 and 0.6 < reached / 400 < 0.8  # four standard deviations


def test_an_answer_that_takes_longer_than_the_deadline_does_not_come() -> None:
    _, stream, inner, now = wire(rtt_s=1.0)
    stream.write(b"a")
    with pytest.raises(httpcore.ReadTimeout):
        stream.read(10, timeout=0.4)
    assert now[0] == pytest.approx(1.0 + 0.5 + 0.4) and inner.heard == 1


def test_closed_forms_with_a_round_trip() -> None:
    """Without one it is Theorem 3.8; a longer one calls for longer drafts, never below the best without it."""
    for alpha in (0.5, 0.8):
        for c in (0.05, 0.2):
            assert best_gamma_over(alpha, c, 0.0) == best_gamma(alpha, c)
            for gamma in (0, 3, 7):
                assert speedup_over(alpha, gamma, c, 0.0) == pytest.approx(walltime_improvement(alpha, gamma, c))
            best = [best_gamma_over(alpha, c, r) for r in (0.0, 0.5, 1.0, 4.0, 16.0)]
            assert best == sorted(best) and best[-1] > best[0]
            for r, gamma in zip((0.0, 0.5, 1.0, 4.0, 16.0), best, strict=True):
                assert speedup_over(alpha, gamma, c, r) >= max(speedup_over(alpha, g, c, r) for g in range(65))
    assert speedup_over(0.8, 4, 0.1, 2.0, v=1.2) == pytest.approx((1 - 0.8**5) / 0.2 / (1.2 + 0.4 + 2.0))


def some(round_s: float, drafted: tuple[int, ...] = (4,) * 10, beta: float = 1.0, tokens: int = 50) -> Rounds:
    """Rounds of this length, a tenth of their time spent at the edge."""
    whole = round_s * len(drafted)
    return Rounds(tokens, drafted, (beta,) * sum(drafted), 0.1 * whole, 0.7 * whole, 0.2 * whole, 0.0, 0, 0, 0)


def test_a_link_that_adds_its_round_trip_and_no_more_is_foretold_exactly() -> None:
    """Two disturbed runs of seven change nothing."""
    here, far = [some(0.01)] * 5 + [some(0.5)] * 2, [some(3.0)] * 2 + [some(0.04)] * 5
    found = Cell(0.03, here, far).record()
    assert found["s_net"] == pytest.approx(125) and found["foretold"] == pytest.approx(125)
    assert found["measured"] == pytest.approx(125) and found["rounds"] == 70
    slow = Cell(0.03, here, [some(0.05)] * 3).record()
    assert slow["measured"] / slow["s_net"] == pytest.approx(0.8)


def test_lengths_that_vary_are_foretold_one_by_one() -> None:
    """E[tokens] of 1 and of 3 drafted at alpha 0.5 are 1.5 and 1.875; of the mean length it would be 1.75."""
    found = Cell(0.0, [some(0.01)], [some(0.01, (1, 3), 0.5, 3)]).record()
    assert found["gamma"] == 2 and found["s_net"] == pytest.approx((1.5 + 1.875) / 2 / 0.01)


def test_the_closed_forms_length_grows_with_the_round_trip() -> None:
    """Of rounds as above a drafted token costs 0.025 of a round, and a plain step is a round but for the rest."""
    four = some(0.01, beta=0.7)
    lengths = [gamma_for(rtt_s, 0.007, four) for rtt_s in (0.0, 0.01, 0.1)]
    assert lengths == [best_gamma_over(0.7, 1 / 28, (rtt_s + 0.002) / 0.007, 24) for rtt_s in (0.0, 0.01, 0.1)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
