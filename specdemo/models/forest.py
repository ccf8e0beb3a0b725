"""Who sees whom when a draft is scored in one pass: a node sees the tokens before the draft and its own ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from specdemo.core.step import Draft


def positions(rows: int, held: int, draft: Draft) -> list[int]:
    """The place in the text of each of `rows` new tokens, the last of which are the draft's nodes."""
    length = held + rows - len(draft)
    return [*range(held, length), *(length + len(draft.path(node)) - 1 for node in range(len(draft)))]


def visible(rows: int, held: int, draft: Draft) -> Tensor:
    """Bool `[rows, held + rows]`: which keys each of `rows` new tokens sees."""
    first = rows - len(draft)  # row of node 0
    seen = torch.ones(rows, held + rows, dtype=torch.bool).tril(held)
    seen[first:, held + first :] = False
    for node in range(len(draft)):
        seen[first + node, [held + first + one for one in draft.path(node)]] = True
    return seen
