"""EAGLE: a single-layer head drafts a chain from hidden states of the target (2401.15077, 2503.01840)."""

from __future__ import annotations

from specdemo.drafters.heads.build import head_method

METHOD = head_method(
    name="eagle",
    title="a head on hidden states of the target drafts (EAGLE)",
    notes="""\
**EAGLE** drafts with a single layer, which combines hidden states of the target with the next token: the final state
(EAGLE-1 and 2), or those of three layers (EAGLE-3). The states of drafted tokens are the head's own. Tokens are sampled
from q over a draft vocabulary and verified by the rule, so the text is exact for any head. A draft token costs a few
percent of a target pass on a CPU, half a pass of a small target on a GPU. With method tree the head drafts the tree of
EAGLE-2.
*EAGLE 2401.15077; EAGLE-2 2406.16858; EAGLE-3 2503.01840.*""",
)
