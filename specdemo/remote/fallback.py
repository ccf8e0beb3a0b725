"""Verdicts for lack of one: what is taken of a draft when the target has not been asked, or has not answered yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specdemo.core.step import Draft, Verdict


def unverified(draft: Draft, accepted: tuple[int, ...], notes: Mapping[str, float]) -> Verdict:
    """Tokens of a draft that are taken without asking the target."""
    unknown = (None,) * len(draft)
    return Verdict(accepted, None, unknown, unknown, unknown, notes=dict(notes))


def provisional(draft: Draft, notes: Mapping[str, float]) -> Verdict:
    """The draft's first token, for lack of a verdict (practice guide, section 8)."""
    return unverified(draft, (0,), {**notes, "provisional": 1.0})


def first_path(draft: Draft) -> tuple[int, ...]:
    """From the root always to the first child."""
    kids, path, node = draft.children(), [], -1
    while node in kids:
        node = kids[node][0]
        path.append(node)
    return tuple(path)


def later_verified(draft: Draft, said: Sequence[int], notes: Mapping[str, float]) -> Verdict:
    """What is known of how the text goes on, as a verdict on a draft: one token more than the draft has of it."""
    kids, path, node = draft.children(), [], -1
    for token in said[:-1]:
        child = next((kid for kid in kids.get(node, ()) if draft.tokens[kid] == token), None)
        if child is None:
            break
        node = child
        path.append(child)
    return replace(unverified(draft, tuple(path), notes), token=said[len(path)])
