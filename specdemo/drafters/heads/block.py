"""Heads that draft several tokens in one pass over hidden states of the target: DFlash (2602.06036) and DSpark."""

from __future__ import annotations

from specdemo.drafters.heads.build import head_method

METHOD = head_method(
    name="block",
    title="a head on hidden states of the target drafts several tokens in one pass",
    notes="""\
**A DFlash or DSpark head** computes the states of all draft positions in one pass, so a draft costs about as much as
one token of EAGLE-3. The Markov head of DSpark adds the token before to the logits of a position, which makes q a
chain: tokens are sampled from q and verified by the rule, so the text is exact for any head. It predicts the chance
that a token is accepted before it is chosen; policy *path* ends the draft by these confidences.
*DFlash 2602.06036, DSpark 2607.05147.*""",
)
