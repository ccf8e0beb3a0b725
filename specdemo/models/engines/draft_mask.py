"""Who sees whom when a draft is scored in one pass: a node sees the tokens before the draft and its own ancestors.

`held` positions are there already: tokens of the text, and after all of those perhaps the draft's first nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdemo.core.step import Draft


def positions(rows: int, held: int, draft: Draft) -> list[int]:
    """The place in the text of each of `rows` new tokens, the last of which are the draft's nodes."""
    length = held + rows - len(draft)
    nodes = range(max(0, held - length), len(draft))
    return [*range(held, length), *(length + len(draft.path(node)) - 1 for node in nodes)]


def visible(rows: int, held: int, draft: Draft) -> Tensor:
    """Bool `[rows, held + rows]`: which keys each of `rows` new tokens sees."""
    length = held + rows - len(draft)
    seen = torch.ones(rows, held + rows, dtype=torch.bool).tril(held)
    for node in range(max(0, held - length), len(draft)):
        row = seen[length - held + node]
        row[length:] = False
        row[[length + one for one in draft.path(node)]] = True
    return seen
