"""Linear layers with the stored matrices of GGUF files."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from specdemo.native.interface import QUANTISED_GGUF

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 22


class GgufLinear(nn.Module):
    """Linear layer with stored bytes `weight` `[out_features, bytes]`."""

    def __init__(
        self,
        kind: str,
        weight: Tensor,
        in_features: int,
        dtype: torch.dtype | None,
        notify: Callable[[], None] = lambda: None,
        byte_inputs: bool = False,
    ) -> None:
        """`dtype`: None keeps stored bytes; `notify`: called by `expanded`; `byte_inputs`: of 8 bits."""
        super().__init__()
        self.kind, self.weight = kind, weight
        self.bias: Tensor | None = None
        self.dtype = dtype
        self.byte_inputs = byte_inputs and dtype is None
        self.in_features, self.out_features = in_features, len(weight)
        self._notify = notify

    def expanded(self) -> Tensor:
        self._notify()
        if self.dtype is None:
            return self.weight
        return dequantised(self.kind, self.weight, self.in_features, self.dtype)


_HEADER_BYTES = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}  # bytes of half-precision scales and minima


def separated(kind: str, stored: Tensor) -> dict[str, Tensor]:
    """Return integers `weights` `[rows, columns]` and `scales` `[rows, groups, numbers]`."""
    if kind == "Q4_K":
        return _separated_q4_k(stored.unflatten(1, (-1, 144)))
    if kind == "Q6_K":
        return _separated_q6_k(stored.unflatten(1, (-1, 210)))
    header = _HEADER_BYTES[kind]
    blocks = stored.unflatten(1, (-1, header + (32 if kind == "Q8_0" else 16)))
    scales, data = blocks[..., :header].contiguous().view(torch.float16), blocks[..., header:]
    codes = data.view(torch.int8) if kind == "Q8_0" else torch.cat((data & 15, data >> 4), -1)
    return {"weights": codes.flatten(1), "scales": scales}


def _separated_q4_k(blocks: Tensor) -> dict[str, Tensor]:
    factors = blocks[..., :4].contiguous().view(torch.float16).float()
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1) * factors[..., :1]
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1) * -factors[..., 1:]
    data = blocks[..., 16:].unflatten(-1, (4, 32))
    codes = torch.stack((data & 15, data >> 4), -2)
    return {"weights": codes.flatten(1), "scales": torch.stack((scales, minima), -1).flatten(1, 2)}


def _separated_q6_k(blocks: Tensor) -> dict[str, Tensor]:
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 32))
    low = torch.cat((low & 15, low >> 4), -1)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    factor = blocks[..., 208:].contiguous().view(torch.float16).float()
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * factor
    return {"weights": ((low | high << 4).to(torch.int8) - 32).flatten(1), "scales": scales.flatten(1)[..., None]}


def dequantised(kind: str, stored: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    if kind in FLOATS:
        return stored.view(FLOATS[kind]).to(dtype, copy=True)
    from gguf import GGMLQuantizationType, dequantize

    rows = torch.empty(len(stored), columns, dtype=dtype)
    size = max(1, _CHUNK // columns)
    for start in range(0, len(stored), size):
        part = dequantize(stored[start : start + size].numpy(), GGMLQuantizationType[kind])
        rows[start : start + size] = torch.from_numpy(part)
    return rows


def common_dtype(kinds: set[str], dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of joined matrices, None for stored integers."""
    if dtype != torch.float32:
        return dtype
    if len(kinds) == 1 and kinds <= {*QUANTISED_GGUF}:
        return None
    if not kinds <= FLOATS.keys():
        return torch.bfloat16
    return FLOATS[next(iter(kinds))] if len(kinds) == 1 else torch.float32


def keeps_values(kind: str, dtype: torch.dtype) -> bool:
    return FLOATS.get(kind) == dtype or (kind in FLOATS and dtype == torch.float32)
