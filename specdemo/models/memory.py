"""Used and free memory of process and devices, in bytes."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import Tensor

TEXT_BYTES = 1 << 30  # memory that another text may take
_SAMPLE_S = 0.2
_OUT_OF_MEMORY = (
    "can't allocate memory",  # message on a CPU
    "CUDA error: out of memory",  # message of AcceleratorError
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)


def process_bytes() -> int:
    return psutil.Process().memory_info().rss


class MemorySampler:
    """Rate-limited `process_bytes`: a query costs as much as drafting a token."""

    def __init__(self) -> None:
        self._due = 0.0
        self._last = 0

    def process_bytes(self) -> int:
        now = time.monotonic()
        if now >= self._due:
            self._due, self._last = now + _SAMPLE_S, process_bytes()
        return self._last


def peak_process_bytes() -> int:
    """Return the peak resident memory (ru_maxrss is in KiB, on macOS in bytes)."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_bytes(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_device_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Return the peak of memory that torch reserved on the device, with free blocks."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def memory_limit(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    system = psutil.virtual_memory()
    return system.available, system.total


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the stored bytes of parameters, buffers and quantization scales; shared tensors count once."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers(), *_scales(model))}
    packed = (getattr(module, "nbytes", 0) for module in model.modules())  # see `PackedLinear`
    return sum(t.numel() * t.element_size() for t in tensors.values()) + sum(packed)


def _scales(model: torch.nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        states = [getattr(getattr(module, "weight", None), "quant_state", None), getattr(module, "state", None)]
        states += [getattr(state, "state2", None) for state in states]
        for state in states:
            if hasattr(state, "absmax") or hasattr(state, "SCB"):
                yield from (value for value in vars(state).values() if isinstance(value, Tensor))


def is_mapped(tensor: Tensor) -> bool:
    return not tensor.untyped_storage().resizable()


def trim_heap() -> None:
    """Return freed blocks to the system (glibc). New threads share an arena: the free end of others would remain."""
    arena_max = -8  # M_ARENA_MAX in malloc.h
    _libc("mallopt", arena_max, 1)
    _libc("malloc_trim", 0)


class LargePageBuffer:
    """Memory for tensors in 2 MiB pages (Linux)."""

    _page = 2 << 20
    _advice = 14  # MADV_HUGEPAGE in mman.h

    def __init__(self, chunk: int = 64 << 20) -> None:
        """`chunk`: least bytes of an allocation."""
        self._chunk, self._free = chunk, torch.empty(0, dtype=torch.uint8)

    def place(self, tensor: Tensor) -> Tensor:
        """Copy a contiguous tensor."""
        size = tensor.nbytes + -tensor.nbytes % 64
        if len(self._free) < size:
            self._free = self._allocate(max(size, self._chunk))
        place, self._free = self._free[: tensor.nbytes], self._free[size:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _allocate(self, size: int) -> Tensor:
        memory = torch.empty(size + self._page, dtype=torch.uint8)
        start = -memory.data_ptr() % self._page
        _libc("madvise", ctypes.c_void_p(memory.data_ptr() + start), ctypes.c_size_t(size), self._advice)
        return memory[start : start + size]


def _libc(name: str, *arguments: object) -> None:
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), name, None)):
        function(*arguments)


def release_memory() -> None:
    gc.collect()  # models and idle engines contain reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    trim_heap()


def is_out_of_memory(error: BaseException) -> bool:
    """Detect out-of-memory errors; only some are `torch.OutOfMemoryError`."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


def describe_failure(error: BaseException) -> str:
    """Return the message of an error, with the remedy for CUDA errors."""
    text = str(error) or type(error).__name__
    if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
        return f"{text.splitlines()[0]}: restart the program, which cannot use the GPU any more"
    return text


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device, on the host within container limits."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return min([psutil.virtual_memory().available, *_cgroup_free_bytes()])


def has_memory_for_text() -> bool:
    """Return True if the host has memory for another text."""
    return free_bytes(torch.device("cpu")) >= TEXT_BYTES


def _cgroup_free_bytes() -> list[int]:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        lines = (folder / "memory.stat").read_text().split()
    except OSError:
        return []
    if not limit.isdecimal():
        return []
    reclaimable = int(dict(zip(lines[::2], lines[1::2], strict=True)).get("inactive_file", 0))
    return [max(0, int(limit) - int(used) + reclaimable)]
