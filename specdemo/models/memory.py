"""What is used: process and device memory, in bytes."""

from __future__ import annotations

import sys
import time

import psutil
import torch

from specdemo.models.packed import PackedLinear


def process_bytes() -> int:
    """Resident memory of this process now."""
    return psutil.Process().memory_info().rss


class Watch:
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


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers, tied ones once, as they are stored (packed where quantised)."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    packed = (module.nbytes for module in model.modules() if isinstance(module, PackedLinear))
    return sum(t.numel() * t.element_size() for t in tensors.values()) + sum(packed)
