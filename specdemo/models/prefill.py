"""Division of prompts into chunks, between which other jobs use the device."""

from __future__ import annotations

import torch

CHUNK_S = 0.5
MOST_ROWS = 512  # masks grow with the rows
_BYTES_PER_S = 32e9  # weights per row and second of a CPU, about


def first_rows(weight_bytes: int, device: torch.device) -> int:
    """Estimate the rows of the first chunk, a power of two."""
    rows = int(CHUNK_S * _BYTES_PER_S / max(1, weight_bytes)) if device.type == "cpu" else MOST_ROWS
    return 1 << min(max(1, rows), MOST_ROWS).bit_length() - 1


class ChunkSize:
    """Rows of the next chunk, which takes at most about `CHUNK_S` seconds.

    Fast models always use the same sizes, and hence compute the same bits.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def observe(self, seconds: float) -> None:
        """Adapt the size to the duration of a chunk."""
        if 2 * seconds <= CHUNK_S:
            self.rows = min(2 * self.rows, MOST_ROWS)
        while seconds > CHUNK_S and self.rows > 1:
            self.rows, seconds = self.rows // 2, seconds / 2
