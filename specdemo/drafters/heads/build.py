"""Registry entries and drafters of heads."""

from __future__ import annotations

from functools import partial

from specdemo.core.errors import UserError
from specdemo.drafters.chain import ChainDrafter
from specdemo.drafters.method import BuildContext, Method


def head_method(name: str, title: str, notes: str) -> Method:
    """Return the entry of the method that drafts with heads of kind `name`."""
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
