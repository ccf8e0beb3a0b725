"""The wire as an edge sees it: what is counted, delayed, slowed down and lost; the closed forms with a round trip."""

from __future__ import annotations

from typing import Any

import httpcore
import pytest

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
