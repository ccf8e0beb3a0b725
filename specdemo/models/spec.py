"""Model specifications: name, dtype, quantization and device. Imports neither torch nor transformers."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from specdemo.core.errors import UserError
from specdemo.native.build import unsupported_vectors

if TYPE_CHECKING:
    import torch

DTYPES = {
    "auto": "float32 on a CPU, bfloat16 on an accelerator (CUDA before Ampere: float16)",
    "float32": "4 bytes per weight: speculative and AR greedy text agree best",
    "bfloat16": "2 bytes per weight",
    "float16": "2 bytes per weight; slow on most CPUs",
}


@dataclass(frozen=True)
class Quantization:
    """Storage format of the weights of linear layers."""

    title: str
    bits: int | None = None  # bits per weight
    dtype: str | None = None  # dtype of all weights; overrides ModelSpec.dtype


QUANTIZATIONS = {
    "none": Quantization("unquantized weights in the chosen dtype"),
    "bf16": Quantization("bfloat16 weights: 2 bytes per weight", dtype="bfloat16"),
    "fp16": Quantization("float16 weights: 2 bytes per weight", dtype="float16"),
    "int8": Quantization(
        "8-bit integers: 1 byte per weight; on GPUs with Triton activations keep 16 bits "
        "(NVIDIA H200: 1.27 times bf16's tokens/s)",
        8,
    ),
    "nf4": Quantization(
        "4-bit NormalFloat with quantized scales: 0.52 bytes per weight (NVIDIA H200: 1.08 times bf16's tokens/s)", 4
    ),
}
REMOVED_QUANTIZATIONS = dict.fromkeys(("fp4", "nf4-single", "fp4-single"), "choose nf4")
ACTIVATION_BITS = {
    "auto": "8 bits for quantised weights of GGUF files in the native engine, otherwise 16",
    "16": "inputs of quantised weights rounded to 16 bits",
    "8": "GGUF files: rounded to 8 bits per 32 inputs, as llama.cpp; faster with several rows",
}
SPREAD = "spread"  # device name: accelerate fills the accelerators, then the host


@dataclass(frozen=True)
class ModelSpec:
    """Hugging Face id, directory or GGUF file (on the hub: `owner/name/file.gguf`); `dtype`: also the compute dtype."""

    name: str
    dtype: str = "auto"
    quantization: str = "none"
    device: str = "auto"
    revision: str | None = None  # commit, tag or branch on the hub
    activations: str = "16"  # a key of `ACTIVATION_BITS`

    def __post_init__(self) -> None:
        if self.activations == "8" and not is_gguf(self.name):
            raise UserError(f"{self.name} is no GGUF file, so it has no 8-bit activations: choose auto or 16")

    @property
    def title(self) -> str:
        return _title(self.name)

    def resolved(self) -> ModelSpec:
        """Replace "auto" by actual values, so that equivalent specs compare equal."""
        device = self.device if self.device == SPREAD else str(find_device(self.device))
        return replace(self, dtype=self._dtype(), device=device)

    def _dtype(self) -> str:
        quantization = QUANTIZATIONS[self.quantization]
        if quantization.dtype:
            return quantization.dtype
        if self.dtype != "auto":
            return self.dtype
        device = main_device(self)
        if device.type == "cpu":
            return "float16" if quantization.bits == 8 else "float32"  # LLM.int8() converts its inputs to float16
        if device.type == "mps":
            return "bfloat16"
        import torch

        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"


@dataclass(frozen=True)
class HeadSpec:
    """Hugging Face id or directory of a drafting head, and the target that it drafts for."""

    name: str
    target: ModelSpec

    @property
    def title(self) -> str:
        return _title(self.name)

    def resolved(self) -> HeadSpec:
        return replace(self, target=self.target.resolved())


def _title(name: str) -> str:
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() or (is_gguf(name) and path.is_file()) else name


SAME = "same"  # name of a drafter that is the target in a smaller form
COPY_FORMS = ("int8", "nf4")  # the first form is the default


def smaller_copy(target: ModelSpec, quantization: str, device: str) -> ModelSpec:
    """Raises `UserError` unless the weights of the copy are smaller."""
    copy = replace(target, quantization=quantization, device=device)
    if is_gguf(target.name):
        raise UserError(
            f"{target.title} runs as stored, since GGUF files are not quantised, so no smaller copy can draft: "
            "choose its safetensors checkpoint, or method nasd, suffix or self"
        )
    own, bits = (QUANTIZATIONS[spec.quantization].bits for spec in (target, copy))
    halved = own is None and target.resolved().dtype == "float32" if bits is None else own is None or bits < own
    if not halved:
        form = target.quantization if target.quantization != "none" else target.resolved().dtype
        raise UserError(
            f"drafter same in {copy.quantization} is not smaller than the target in {form}: choose a "
            "smaller drafter_quantization, or another drafter"
        )
    return copy


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf") and not Path(name).expanduser().is_dir()


def main_device(spec: ModelSpec) -> torch.device:
    """Return the first device."""
    return find_device("auto" if spec.device == SPREAD else spec.device)


def find_device(name: str) -> torch.device:
    """Raises `UserError` for unavailable devices, and for an unsupported value of `SPECDEMO_VECTORS`."""
    import torch

    if reason := unsupported_vectors():
        raise UserError(reason)
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        if reason := unused_gpu():
            warnings.warn(f"running on the CPU: {reason}", stacklevel=2)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"unknown device {name!r}: known are auto, cpu, cuda, cuda:N, mps and {SPREAD}")
    if (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()) or (
        device.type == "mps" and not torch.backends.mps.is_available()
    ):
        remedy = device.type == "cuda" and not torch.cuda.is_available() and unused_gpu()
        raise UserError(
            remedy or f"there is no device {name} on this machine: choose cpu, or auto for the fastest device"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device(device.type)


@cache
def unused_gpu() -> str | None:
    """Return why torch cannot use this machine's NVIDIA GPU, with the remedy."""
    import torch

    windows = sys.platform == "win32" and os.path.exists(r"C:\Windows\System32\nvcuda.dll")
    if torch.cuda.is_available() or not (windows or os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi")):
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA, install the CUDA build from https://pytorch.org"
    return f"torch {torch.__version__} cannot start CUDA {torch.version.cuda}, update the NVIDIA driver"
