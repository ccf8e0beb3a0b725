"""Recording of passes as CUDA graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

GRAPH_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # passes are padded to the next one
MAX_ROWS = GRAPH_ROWS[-1]
GRAPH_LIMIT = 32  # graphs per engine
_STREAMS = 32  # streams that torch returns in turn
_POOL_BYTES = 22 << 20  # estimated bytes of a memory pool
_WORKSPACE_BYTES = 32 << 20  # cuBLAS workspace of each stream


def graph_rows(count: int) -> int:
    return next(rows for rows in GRAPH_ROWS if rows >= count)


def graph_bytes(vocab_size: int, width: int) -> int:
    """Estimate the bytes of an engine's graphs; `width`: bytes per logit."""
    rows = GRAPH_LIMIT * sum(GRAPH_ROWS) // len(GRAPH_ROWS)
    return _POOL_BYTES + _WORKSPACE_BYTES + rows * vocab_size * width


class GraphRecorder:
    """Records passes of an engine on its own stream and memory pool.

    Torch frees a stream's cuBLAS workspace with any graph of the stream (pytorch#193402), so engines share no streams
    and drop all graphs at once.
    """

    _recorders: weakref.WeakSet[GraphRecorder] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._recorders.add(self)

    def __call__(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture `forward` after two runs that initialise libraries. Each replay overwrites the returned tensor."""
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = self._unused_stream()
            if not self._graphs:
                self._pool = torch.cuda.graph_pool_handle()
            current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):  # a failed `graph` does not restore the stream
                forward(), forward()
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    out = forward()
            current.wait_stream(self._stream)
        self._graphs.add(graph)

        def replay(_recorder: GraphRecorder = self) -> Tensor:
            graph.replay()
            return out

        return replay

    def _unused_stream(self) -> torch.cuda.Stream:
        used = {recorder._stream.cuda_stream for recorder in self._recorders if recorder._stream is not None}
        for _ in range(_STREAMS):
            stream = torch.cuda.Stream(self._device)
            if stream.cuda_stream not in used:
                return stream
        raise RuntimeError("all CUDA streams are in use")
