"""Fake of `torch.cuda` graphs: real operations on the CPU, with streams, memory pools, workspaces and their lifetimes.

A graph records the operations of a capture and replays them into the same tensors. Every stream has a cuBLAS workspace,
which is freed with any graph of the stream (torch 2.13, pytorch#193402); replaying another graph of that stream is an
illegal access.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from specdemo.core import sampling
from specdemo.models.engines.cuda_graphs import GraphRecorder
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.native import sampling as native_sampling

REPLAY_MS = 1e-3
STREAMS = 32  # streams of a device, returned in turn
CALLING_HOST = ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "equal")
READING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
CREATING = ("empty.memory_format", "zeros.", "ones.", "full.", "arange", "scalar_tensor", "tensor")


@dataclass(eq=False)
class FakeStream:
    device: torch.device
    cuda_stream: int

    def wait_stream(self, other: FakeStream) -> None: ...


class FakeEvent:
    """Event whose time is the number of replays before it, each of which takes `REPLAY_MS`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self.replays = self.cuda.replays

    def elapsed_time(self, other: FakeEvent) -> float:
        return REPLAY_MS * (other.replays - self.replays)


class Recorded(TorchDispatchMode):
    """Record operations; refuse illegal operations of a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name.startswith(CALLING_HOST + CREATING) or (kwargs or {}).get("device") is not None:
            raise RuntimeError(f"{func} during a capture")
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.recorded = cuda, Recorded()

    def begin(self, stream: FakeStream) -> None:
        self.stream = stream.cuda_stream
        self.workspace = self.cuda.workspaces[stream.cuda_stream]  # created by the warm-up
        weakref.finalize(self, self.cuda.workspaces.pop, self.stream, None)

    def replay(self) -> None:
        self.cuda.replays += 1
        if self.cuda.workspaces.get(self.stream) is not self.workspace:
            raise RuntimeError(f"the workspace of stream {self.stream} was freed")
        with _disable_current_modes():
            for func, args, kwargs, out in self.recorded.operations:
                new = func(*args, **kwargs)
                for old, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != value.data_ptr():
                        old.copy_(value)


class HostCalls(TorchDispatchMode):
    """Count launches of kernels outside of graphs, replays of graphs, and what the host waits for."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.launches = self.reads = 0
        self._cuda, self._replays = cuda, cuda.replays

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name.startswith(READING):
            self.reads += 1
        elif func._schema.is_mutable or not any(value.alias_info for value in func._schema.returns):  # not a view
            self.launches += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counted(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        listed = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            self.reads += 1
            return listed(tensor)

        with patch.context() as inner, self:
            inner.setattr(torch.Tensor, "tolist", tolist)
            yield

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.launches, self._cuda.replays - self._replays, self.reads


class FakeCuda:
    """Install with `install`; `captures` lists the streams of all captures."""

    def __init__(self) -> None:
        self.default = FakeStream(torch.device("cuda", 0), 0)
        self.stack: list[FakeStream] = [self.default]
        self.numbers, self.pools = count(), count(1)
        self.workspaces: dict[int, object] = {}
        self.captures: list[FakeStream] = []
        self.replays = 0
        self.fail: Callable[[], None] = lambda: None

    @property
    def current(self) -> FakeStream:
        return self.stack[-1]

    def new_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(device, 1 + next(self.numbers) % STREAMS)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = list(self.stack)
        self.stack.append(stream)
        self.workspaces.setdefault(stream.cuda_stream, object())
        try:
            yield
        finally:
            self.stack[:] = before

    @contextmanager
    def graph(self, graph: FakeGraph, pool: int, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        self.stack.append(stream)
        self.captures.append(stream)
        graph.begin(stream)
        with graph.recorded:
            yield
        self.fail()  # like `capture_end`, which then leaves the stream set
        self.stack.pop()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "Stream": self.new_stream,
            "stream": self.stream,
            "device": lambda device: nullcontext(),
            "current_stream": lambda device=None: self.current,
            "Event": lambda enable_timing: FakeEvent(self),
            "CUDAGraph": lambda: FakeGraph(self),
            "graph_pool_handle": lambda: next(self.pools),
            "graph": self.graph,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(sampling, "is_on_host", lambda tensor: False)
        patch.setattr(native_sampling, "_TOP_P_WIDTH", 1 << 20)  # devices sort all tokens
        patch.setattr(GraphRecorder, "_recorders", weakref.WeakSet())  # those of other tests have other streams
        patch.setattr(LlamaWeights, "recordable", property(lambda weights: True))
