"""Figures of runs without durations and over links, and intervals of resampled runs."""

from dataclasses import replace

import pytest

from specdemo.core.link_stats import LinkStats, Source
from specdemo.core.metrics import Metrics, interval, ratio_interval
from specdemo.core.step import Draft, Step, Verdict


def step(i: int, tokens: int, draft: Draft, verdict: Verdict, seconds: float | None = 0.0, t: float = 0.0) -> Step:
    """Drafting takes `seconds`, verification twice and the rest three times as long."""
    times = [None if seconds is None else seconds * part for part in (1, 2, 3)]
    return Step(i, (7,) * tokens, draft, verdict, 4, *times, t)


PREFILL = step(0, 1, Draft(), Verdict((), 7), 8.0, t=0.5)
CHAIN = step(1, 3, Draft.chain((1, 2, 3, 4)), Verdict((0, 1), 7, beta=(0.5, 1.0, 0.25, None)), 1.0, t=1.0)
TREE = step(  # 1 or 2, then 3 or 4 after 2; 4 is accepted after a test of 3
    2, 3, Draft((1, 2, 3, 4), (-1, -1, 1, 1)), Verdict((1, 3), 7, beta=(0.5, 0.5, 0.0, 1.0)), 2.0, t=2.5
)
PLAIN = step(3, 1, Draft(), Verdict((), 7), 4.0, t=3.0)


@pytest.mark.parametrize("unknown", ["draft_s", "verify_s", "host_s"])
def test_an_engine_without_durations_is_timed_between_its_tokens(unknown: str) -> None:
    done = Metrics.of([PREFILL, CHAIN, replace(TREE, **{unknown: None}), PLAIN])
    assert getattr(done, unknown) is None and (done.ttft_s, done.last_s) == (0.5, 3.0)
    assert done.decode_s == 2.5 and done.tokens_per_second == 7 / 2.5
    assert Metrics(draft_s=None, last_s=2.0).decode_s == 2.0


def linked(source: Source, **measures: float) -> Step:
    verdict = Verdict((), 7, source=source, link=LinkStats(**measures))  # type: ignore[arg-type]
    return step(1, 1, Draft(), verdict)


def test_measures_of_a_link_are_totals_and_shares_of_steps() -> None:
    steps = [
        linked(Source.TARGET, cloud_s=0.5, hard_ratio=0.5),
        linked(Source.PROVISIONAL, cloud_s=0.25, sent=2),
        PLAIN,
        linked(Source.GATE, hard_ratio=0.25),
    ]
    metrics = Metrics.of(steps)
    assert metrics.remote == {"escalated": 2.0, "provisional": 1.0, "cloud_s": 0.75, "sent": 2.0, "hard_ratio": 0.75}
    assert metrics.as_dict()["remote"] == {
        "escalated": 2.0, "provisional": 1.0, "cloud_s": 0.75, "sent": 2.0,
        "cloud_call_share": 2 / 4, "provisional_share": 1 / 4, "mean_hard_ratio": 0.75 / 4,
    }  # fmt: skip
    assert Metrics.of([linked(Source.TARGET)]).as_dict()["remote"] == {"escalated": 1.0, "cloud_call_share": 1.0}


def test_the_bootstrap_interval_of_a_median_follows_from_the_binomial_distribution() -> None:
    """The median of 11 draws is at most the k-th value if 6 draws are: 0.8 % for k = 2, and 5.3 % for k = 3."""
    values = [*map(float, range(1, 12))]
    assert interval(values) == (3.0, 9.0)


def test_the_bootstrap_interval_of_totals_weighs_pairs_by_their_size() -> None:
    """Of 20 pairs k are (20, 10), others (1, 1): (20 k + 20 - k) / (10 k + 20 - k), with k from 6 to 14 at 95 %."""
    pairs = [(1.0, 1.0), (20.0, 10.0)] * 10
    ratios = [(20 + 19 * k) / (20 + 9 * k) for k in range(21)]
    low, high = ratio_interval(pairs)
    assert low in ratios[5:8] and high in ratios[13:16]
    assert ratio_interval([(3.0, 2.0)] * 4) == (1.5, 1.5)
