"""Draft with a head on hidden states of the target: EAGLE, Medusa, and the block heads DFlash and DSpark."""

from __future__ import annotations

from functools import partial

from specdemo.core.errors import UserError
from specdemo.drafters.chain import ChainDrafter
from specdemo.drafters.method import BuildContext, Method


def head_method(name: str, title: str, notes: str) -> Method:
    """Return the entry of the method of heads of kind `name`."""
    return Method(
        name=name,
        title=title,
        notes=notes,
        build=partial(build_head_drafter, kind=name),
        sampled=True,
        drafter="head",
        local_target=True,
        decoder_only=True,
    )


def build_head_drafter(context: BuildContext, kind: str | None = None) -> ChainDrafter:
    """Build the drafter of a head. Raises `UserError` for a head of another kind than `kind`, if given."""
    head = context.head()
    if head is None:
        raise UserError("this method needs a head: set head to a directory or Hugging Face id")
    if kind is not None and head.kind != kind:
        raise UserError(f"the head is not of kind {kind}: choose method {head.kind} or hybrid")
    return ChainDrafter(head, context.draft_sampling, context.noise("draft"), context.vocab_size)


HEAD_METHODS = (
    head_method(
        name="eagle",
        title="a head on hidden states of the target drafts (EAGLE)",
        notes="""\
**EAGLE** drafts with a single layer, which combines hidden states of the target with the next token: the final state
(EAGLE-1 and 2), or those of three layers (EAGLE-3). The states of drafted tokens are the head's own. Tokens are sampled
from q over a draft vocabulary and verified by the rule, so the text is exact for any head. A draft token costs a few
percent of a target pass on a CPU, half a pass of a small target on a GPU. With method tree the head drafts the tree of
EAGLE-2.
*EAGLE 2401.15077; EAGLE-2 2406.16858; EAGLE-3 2503.01840.*""",
    ),
    head_method(
        name="medusa",
        title="several heads on one hidden state of the target draft a token each",
        notes="""\
**Medusa** adds heads to the target's final state. Head i drafts the token i positions ahead without the tokens before
it, so a draft needs no drafting steps, and acceptance falls quickly with i. A chain sampled from the heads has a known
q, so the ordinary rule keeps the text exact; rule typical is the lossy rule of the paper. With method tree the heads
draft a tree. *Medusa 2401.10774.*""",
    ),
    head_method(
        name="block",
        title="a head on hidden states of the target drafts several tokens in one pass",
        notes="""\
**A DFlash or DSpark head** computes the states of all draft positions in one pass, so a draft costs about as much as
one token of EAGLE-3. The Markov head of DSpark adds the token before to the logits of a position, which makes q a
chain: tokens are sampled from q and verified by the rule, so the text is exact for any head. It predicts the chance
that a token is accepted before it is chosen; policy *path* ends the draft by these confidences.
*DFlash 2602.06036, DSpark 2607.05147.*""",
    ),
)
