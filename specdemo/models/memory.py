"""What is used, what is free, and what a model will need, in bytes."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from transformers import AutoConfig

from specdemo.models.packed import PackedLinear, can_pack

SCALES = {"int8": 1.0, "nf4": 0.5 + 1 / 64 + 4 / (64 * 256)}  # bytes of a quantised weight, with those of its scales


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


def reserved_device_bytes(device: torch.device) -> int | None:
    """Bytes that torch holds on an accelerator, those that no tensor uses now included; None on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def room(device: torch.device) -> tuple[int, int]:
    """Bytes that could be had now and bytes in all: on the accelerator, elsewhere of the system's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    system = psutil.virtual_memory()
    return system.available, system.total


@dataclass(frozen=True)
class Needs:
    """What a model will take."""

    weights: int
    kv: int  # keys and values of a thousand tokens


def needs(name: str, dtype: torch.dtype, quantization: str, device: torch.device) -> Needs | None:
    """An estimate from the headers of the weights, which are not read; None for a model that is not on this machine.

    Two-dimensional weights are quantised unless a row is a token's: those stay as they are. Where products are packed,
    a head that shares the embedding has a copy of its own.
    """
    try:
        folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            shapes |= {key: weights.get_slice(key).get_shape() for key in weights.keys()}
    if not shapes:
        return None
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    whole, small = 0, 0
    for shape in shapes.values():
        if quantization in SCALES and len(shape) == 2 and shape[0] != config.vocab_size:
            small += math.prod(shape)
        else:
            whole += math.prod(shape)
    if config.tie_word_embeddings and can_pack(torch.empty(0, dtype=dtype, device=device)):
        whole += config.vocab_size * config.hidden_size
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rows = config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads)
    return Needs(
        round(whole * dtype.itemsize + small * SCALES.get(quantization, 0.0)),
        2 * rows * size * 1000 * dtype.itemsize,
    )


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers, tied ones once, as they are stored (packed where quantised)."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    packed = (module.nbytes for module in model.modules() if isinstance(module, PackedLinear))
    return sum(t.numel() * t.element_size() for t in tensors.values()) + sum(packed)
