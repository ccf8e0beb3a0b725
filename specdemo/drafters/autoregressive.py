"""Autoregressive decoding: the baseline, with empty drafts."""

from __future__ import annotations

from specdemo.core.decode import EmptyDrafter
from specdemo.drafters.method import Method

METHOD = Method(
    name="ar",
    title="autoregressive decoding: the baseline",
    notes="""\
**Autoregressive decoding** runs the target once per token. It is the baseline of every speed-up on this page. It uses
the same decoding loop, with empty drafts.""",
    build=lambda context: EmptyDrafter(),
    drafts=False,
)
