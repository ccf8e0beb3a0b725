"""Medusa: several heads on a hidden state of the target draft a token each (2401.10774)."""

from __future__ import annotations

from specdemo.drafters.heads.build import head_method

METHOD = head_method(
    name="medusa",
    title="several heads on one hidden state of the target draft a token each",
    notes="""\
**Medusa** adds heads to the target's final state. Head i drafts the token i positions ahead without the tokens before
it, so a draft needs no drafting steps, and acceptance falls quickly with i. A chain sampled from the heads has a known
q, so the ordinary rule keeps the text exact; rule typical is the lossy rule of the paper. With method tree the heads
draft a tree. *Medusa 2401.10774.*""",
)
