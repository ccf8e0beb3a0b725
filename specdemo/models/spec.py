"""What to load, and how: names, and which device one means. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specdemo.core.errors import UserError

DTYPES = {
    "auto": "float32 on a CPU, bfloat16 on an accelerator",
    "float32": "4 bytes a weight: speculative and plain greedy text agree best",
    "bfloat16": "2 bytes a weight",
    "float16": "2 bytes a weight; slow on most CPUs",
}


@dataclass(frozen=True)
class Quantization:
    """How the weights of the linear layers are kept."""

    title: str
    bits: int | None = None  # of a weight; None: they are not quantised
    kind: str = ""  # of 4 bits: nf4 or fp4
    double: bool = False  # whether the scales are quantised as well (2305.14314)
    dtype: str | None = None  # of every weight, whatever dtype was asked for


QUANTIZATIONS = {
    "none": Quantization("weights as they are, in the chosen dtype"),
    "bf16": Quantization("weights in bfloat16: 2 bytes a weight", dtype="bfloat16"),
    "fp16": Quantization("weights in float16: 2 bytes a weight", dtype="float16"),
    "int8": Quantization("bitsandbytes LLM.int8(): 1 byte a weight", 8),
    "nf4": Quantization("4-bit NormalFloat, scales quantised too: half a byte a weight", 4, "nf4", double=True),
    "fp4": Quantization("4-bit floats, scales quantised too: half a byte a weight", 4, "fp4", double=True),
    "nf4-single": Quantization("4-bit NormalFloat, scales in float32: 0.56 bytes a weight", 4, "nf4"),
    "fp4-single": Quantization("4-bit floats, scales in float32: 0.56 bytes a weight", 4, "fp4"),
}
SPREAD = "spread"  # a device that is all devices: accelerate places the layers, accelerators first, then the host


@dataclass(frozen=True)
class ModelSpec:
    """A Hugging Face id or local directory, and how to load it. `dtype` is what a quantised model computes in."""

    name: str
    dtype: str = "auto"
    quantization: str = "none"
    device: str = "auto"
    revision: str | None = None  # of a hub repository: a commit, tag or branch; None: its main branch

    @property
    def title(self) -> str:
        """The id, or the last part of a directory's path."""
        path = Path(self.name).expanduser()
        return path.resolve().name if path.is_dir() else self.name

    def resolved(self) -> ModelSpec:
        """The same with "auto" replaced by what it means here: two specs of one model are then equal."""
        device = self.device if self.device == SPREAD else str(find_device(self.device))
        return replace(self, dtype=self._dtype(), device=device)

    def _dtype(self) -> str:
        known = QUANTIZATIONS[self.quantization]
        if known.dtype:
            return known.dtype
        if self.dtype != "auto":
            return self.dtype
        if known.bits == 8:
            return "float16"  # LLM.int8() computes its outliers in it whatever it is given
        return "float32" if main_device(self).type == "cpu" else "bfloat16"


def main_device(spec: ModelSpec) -> torch.device:
    """The device of a spec; of one that is spread over all, the first that is filled."""
    return find_device("auto" if spec.device == SPREAD else spec.device)


def find_device(name: str) -> torch.device:
    """The device of this name, "auto" being the best there is."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}: known are auto, cpu, cuda, cuda:N, mps and {SPREAD}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"there is no device {name} here: choose cpu, or auto for the best there is")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("there is no device mps here: choose cpu, or auto for the best there is")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"unknown device {name!r}: known are auto, cpu, cuda, cuda:N, mps and {SPREAD}")
    return device
