"""Choice of the draft vocabulary of a head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from training.head.conversations import Conversation


def most_frequent(items: Sequence[Conversation], size: int) -> Tensor:
    """Return the most frequent answer tokens, ascending."""
    counts = np.bincount(np.concatenate([item.tokens[item.answers] for item in items]))
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))
