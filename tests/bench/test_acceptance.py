"""Acceptance by draft position, text length and confidence, counted from steps."""

from specdemo.bench.acceptance import Acceptance, AcceptanceCount
from specdemo.core.link_stats import Source
from specdemo.core.metrics import Metrics
from specdemo.core.origin import Origin
from specdemo.core.step import Draft, Step, Verdict


def step(i: int, draft: Draft, accepted: int, tested: int, **verdict: object) -> Step:
    n = len(draft)
    betas = tuple(0.5 if node < tested else None for node in range(n))
    judged = Verdict(tuple(range(accepted)), 7, (0.5,) * n, betas, betas, **verdict)
    return Step(i, (*draft.tokens[:accepted], 7), draft, judged, n, 0.0, 0.0, 0.0, 0.0)


STEPS = [
    step(0, Draft(), 0, 0),
    step(1, Draft.chain((1, 2, 3), (0.9, 0.5, 0.1)), accepted=1, tested=2),
    step(2, Draft.chain((1, 2), (0.9, 0.7)), accepted=2, tested=2),
    step(3, Draft.chain((1,), (0.9,), origin=(Origin("head", confidence=0.3),)), accepted=0, tested=1),
    step(4, Draft.chain((1, 2)), accepted=0, tested=1),
    step(5, Draft.chain((1, 2), (0.5, 0.5)), accepted=1, tested=2, source=Source.GATE, choices=()),
]


def test_counts_of_steps() -> None:
    """Estimates of the drafter precede q; point masses have no confidence; unverified steps do not count."""
    counts = Acceptance.of(STEPS, prompt_length=61)
    assert counts.position == {1: AcceptanceCount(4, 2, 2.1), 2: AcceptanceCount(2, 1, 1.2)}
    # Texts before the drafts: 62 (second token: 63), 64 (65), 67 and 68 tokens.
    assert {key: count.tested for key, count in counts.text_length.items()} == {0: 2, 1: 4}
    shares = {key: (count.tested, count.accepted, count.confidence) for key, count in counts.confidence.items()}
    assert shares == {1: (1, 0, 0.3), 2: (1, 0, 0.5), 3: (1, 1, 0.7), 4: (2, 2, 1.8)}
    assert Acceptance.total([counts, counts]).position[1] == AcceptanceCount(8, 4, 4.2)
    metrics = Metrics.of(STEPS[:5])
    assert [count.tested for count in counts.position.values()] == list(metrics.tested_by_position)
    assert [count.accepted for count in counts.position.values()] == list(metrics.accepted_by_position)
