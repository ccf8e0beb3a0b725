"""What is used and what is free: process and device memory, in bytes."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor

from specdemo.models.engines.packed_linear import PackedLinear

PLAIN = (torch.Tensor, torch.nn.Parameter)  # quantised weights are of kinds of their own


def process_bytes() -> int:
    """Resident memory of this process now."""
    return psutil.Process().memory_info().rss


class MemorySampler:
    """`process_bytes`, asked a few times a second: asking takes as long as drafting a token."""

    def __init__(self, every_s: float = 0.2) -> None:
        self._every, self._due, self._last = every_s, 0.0, 0

    def process_bytes(self) -> int:
        """What it was when last asked."""
        now = time.monotonic()
        if now >= self._due:
            self._due, self._last = now + self._every, process_bytes()
        return self._last


def peak_process_bytes() -> int:
    """The most this process ever had resident (ru_maxrss is in KiB, on macOS in bytes)."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # there is none on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_bytes(device: torch.device) -> int | None:
    """Bytes that tensors take on an accelerator; None on a CPU, where `process_bytes` has them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_device_bytes(device: torch.device) -> int | None:
    """The most that tensors took on an accelerator since the process began; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reserved_device_bytes(device: torch.device) -> int | None:
    """Bytes that torch holds on an accelerator, those that no tensor uses now included; None on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def memory_limit(device: torch.device) -> tuple[int, int]:
    """Bytes that could be had now and bytes in all: on the accelerator, elsewhere of the system's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    system = psutil.virtual_memory()
    return system.available, system.total


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers, tied ones once, as they are stored (packed where quantised)."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    packed = (module.nbytes for module in model.modules() if isinstance(module, PackedLinear))
    return sum(t.numel() * t.element_size() for t in tensors.values()) + sum(packed)


def is_mapped(tensor: Tensor) -> bool:
    """Whether this is read from a file in place: the memory is none that torch took itself."""
    return not tensor.untyped_storage().resizable()


def drop_mapped_files(model: torch.nn.Module) -> None:
    """Copy the weights that were neither packed nor quantised, where those are the smaller part.

    In the dtype of their file they are read from it in place, and as long as one of them is, all of it is held.
    """
    plain = {id(one): one for one in (*model.parameters(), *model.buffers()) if type(one) in PLAIN}.values()
    if 2 * sum(one.nbytes for one in plain) < weight_bytes(model):
        for one in filter(is_mapped, plain):
            one.data = one.data.clone()


def share_one_heap() -> None:
    """Have all threads take memory from one heap, those that have none of their own yet (glibc; nothing elsewhere).

    glibc gives a new thread a heap of its own, and `malloc_trim` leaves the free end of such a heap where it is, up to
    the threshold below. Models are loaded in one thread and let go in another, so every round of that left some more.
    """
    arena_max = -8  # M_ARENA_MAX of malloc.h
    _libc("mallopt", arena_max, 1)


@contextmanager
def given_back_at_once() -> Iterator[None]:
    """Within, whatever is freed in larger pieces goes back to the system at once (glibc; nothing elsewhere).

    Loading frees what it read after laying it out anew. glibc would keep the holes: up to as much again as the weights.
    Afterwards it keeps what passes free, as it would have come to do by itself.
    """
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    _libc("mallopt", mmap_threshold, 128 << 10)
    try:
        yield
    finally:
        _libc("mallopt", mmap_threshold, 32 << 20)  # the most to which glibc raises it by itself,
        _libc("mallopt", trim_threshold, 64 << 20)  # and what follows from that


def on_large_pages(tensors: Iterable[Tensor], budget_s: float = 1.0) -> None:
    """Move what these tensors hold to pages of 2 MiB (Linux 6.1; nothing elsewhere), as many as fit the time.

    Weights that stream through a pass are the quicker to find: see docs/performance.md.
    """
    page, collapse = 2 << 20, 25  # MADV_COLLAPSE of mman.h
    end = time.monotonic() + budget_s
    for tensor in tensors:
        address = torch.ops.mkldnn.data_ptr(tensor) if tensor.is_mkldnn else tensor.data_ptr()
        first, last = address // page, -(-(address + tensor.nbytes) // page)
        if time.monotonic() < end:
            _libc("madvise", ctypes.c_void_p(first * page), ctypes.c_size_t((last - first) * page), collapse)


def _libc(name: str, *arguments: object) -> None:
    """Call a function of the system's library for C if it has it; it may decline."""
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), name, None)):
        function(*arguments)


def release_memory() -> None:
    """Let go of the memory of what was dropped, to the system and to the other users of the accelerator."""
    gc.collect()  # a model and its idle engine hold one another
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _libc("malloc_trim", 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is about memory that could not be had. On a CPU torch says so in words only."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def free_bytes(device: torch.device) -> int:
    """Bytes that could be taken on this device now; on the host no more than a container's limit leaves."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own to give again
        return torch.cuda.mem_get_info(device)[0] + kept
    return min([psutil.virtual_memory().available, *_left_by_limits()])


def _left_by_limits() -> list[int]:
    """What each control group that this process is in still allows (Linux; version 2, then 1)."""
    left = []
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            numbers = [(Path(folder) / name).read_text().strip() for name in (limit, used)]
            lines = (Path(folder) / "memory.stat").read_text().split()
        except OSError:
            continue
        if numbers[0].isdecimal():
            stat = dict(zip(lines[::2], lines[1::2], strict=True))
            reclaimable = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
            left.append(max(0, int(numbers[0]) - int(numbers[1]) + reclaimable))
    return left
