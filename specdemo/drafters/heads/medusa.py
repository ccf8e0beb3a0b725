"""Medusa: several heads on a hidden state of the target draft a token each (2401.10774)."""

from __future__ import annotations

from functools import partial

from specdemo.drafters.heads.chain import build_head_drafter
from specdemo.drafters.method import Method

METHOD = Method(
    name="medusa",
    title="several heads on one hidden state of the target draft a token each",
    notes="""\
**Medusa** adds heads to the target's final state. Head i drafts the token i positions ahead without the tokens before
it, so a draft needs no drafting steps, and acceptance falls quickly with i. A chain sampled from the heads has a known
q, so the ordinary rule keeps the text exact; rule typical is the lossy rule of the paper. With method tree the heads
draft a tree. *Medusa 2401.10774.*""",
    build=partial(build_head_drafter, kind="medusa"),
    sampled=True,
    drafter="head",
    local_target=True,
    decoder_only=True,
    preflight="decoding",
)
