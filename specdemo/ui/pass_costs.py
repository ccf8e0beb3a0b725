"""Cost of checking several tokens in a single pass, relative to a pass that writes one: the cause of a speed-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from specdemo.ui.lane import PLAIN, SPEC, Lane, mode

DISTURBED = 0.9  # ratio of times below which noise is the cause


def pass_costs(lanes: Mapping[str, Lane]) -> dict[str, Any] | None:
    """Return the median times of both kinds of passes in a finished comparison on this machine, with a sentence.

    `rows` is the most frequent number of draft tokens and the token after them.
    """
    spec, plain = lanes.get(SPEC), lanes.get(PLAIN)
    if spec is None or plain is None or not (spec.ended and plain.ended) or mode(spec.recipe):
        return None
    checked = [(len(event.step.draft), event.step.verify_s) for event in spec.steps[1:] if event.step.draft.tokens]
    single = [event.step.verify_s for event in plain.steps[1:] if event.step.verify_s]
    drafts = Counter(length for length, verify_s in checked if verify_s)
    if not drafts or not single:
        return None
    rows = 1 + drafts.most_common(1)[0][0]
    several_s = median(verify_s for length, verify_s in checked if verify_s and length + 1 == rows)
    ratio = several_s / median(single)
    if ratio < DISTURBED:
        cause = f"checking {rows} tokens cannot be faster than writing 1"
        words = f"Other programs disturbed the times of the passes: {cause}. Press Repeat."
    else:
        words = f"Why: checking {rows} tokens takes {ratio:.1f} times as long as writing 1."
    return {"words": words, "bars": [["writing 1", median(single)], [f"checking {rows}", several_s]]}
