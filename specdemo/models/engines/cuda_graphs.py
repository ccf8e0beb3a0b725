"""CUDA graphs of one engine: shapes, recording on a stream of its own, memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

GRAPH_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # recorded row counts; passes are padded to the next one
MAX_ROWS = GRAPH_ROWS[-1]
GRAPH_LIMIT = 32  # graphs of an engine
_FIRST_KEYS = 256
_STREAMS = 32  # `torch.cuda.Stream` returns the streams of a pool in turn
_POOL_BYTES = 22 << 20  # estimates, not measured: intermediate results
_WORKSPACE_BYTES = 32 << 20  # of cuBLAS, per stream


def graph_rows(count: int) -> int:
    return next(rows for rows in GRAPH_ROWS if rows >= count)


def graph_keys(count: int) -> int:
    keys = _FIRST_KEYS
    while keys < count:
        keys *= 2
    return keys


def graph_bytes(vocab_size: int, width: int) -> int:
    """Estimate the memory of an engine's graphs; each retains its logits, `width` bytes per value."""
    rows = GRAPH_LIMIT * sum(GRAPH_ROWS) // len(GRAPH_ROWS)
    return _POOL_BYTES + _WORKSPACE_BYTES + rows * vocab_size * width


class GraphRecorder:
    """Records passes of one engine on a stream and a memory pool that no other engine uses.

    Graphs contain the address of their stream's cuBLAS workspace, which torch frees with any graph of that stream
    (pytorch#193402). Therefore streams are not shared, and an engine must drop all of its graphs at once.
    """

    _recorders: weakref.WeakSet[GraphRecorder] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._recorders.add(self)

    def __call__(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture `forward`. Each replay overwrites the returned tensor. Raises `RuntimeError`.

        Two warm-up runs on the same stream initialise libraries, which must not be captured.
        """
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = self._unused_stream()
            if not self._graphs:  # a pool ends with its last graph
                self._pool = torch.cuda.graph_pool_handle()
            current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):  # `graph` does not restore the stream if the capture fails
                forward(), forward()
                # Other threads may allocate meanwhile.
                options = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
                with torch.cuda.graph(graph, **options):
                    out = forward()
            current.wait_stream(self._stream)
        self._graphs.add(graph)

        def replay(_recorder: GraphRecorder = self) -> Tensor:  # the stream stays in use as long as the graph
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
