"""Linear layers whose products of few rows run in `row_kernels`: 4-bit and 8-bit codes, and 16-bit floats."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CODE4 = "CODE4"
INT8 = "INT8"
FLOAT = "FLOAT"
FEW_ROWS = 16
_BLOCK = 64  # inputs per scale of 4-bit codes; inputs are stored in blocks of this size
_NESTED_BLOCK = 256  # scales per scale of scales
_WORD = 4  # scale codes per 32-bit word
_LONGEST = _NESTED_BLOCK * _BLOCK  # inputs of a partial sum: its scales have at most two scales of scales
_LEAST_CAPABILITY = (8, 0)
_ARGUMENTS = ("weight", "scales", "levels", "groups", "starts", "values")
NF4_CODES = (  # quantiles of a normal distribution (2305.14314, appendix E)
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Factors of the values of codes: rounding errors are small, and `_paired_codes` exists.
_FACTORS = {torch.bfloat16: 1.5234375, torch.float16: 1.88671875}


@dataclass(frozen=True)
class Tiles:
    """Tiles of `product`: outputs, blocks of inputs per step, least programs, warps and stages of a pipeline."""

    outputs: int
    blocks: int
    programs: int
    warps: int
    stages: int

    def splits(self, outputs: int, width: int) -> int:
        """Return the number of partial sums, which depends only on the matrix."""
        steps = -(-width // (_BLOCK * self.blocks))
        wanted = -(-self.programs // -(-outputs // self.outputs))
        share = -(-steps // min(steps, max(wanted, -(-width // (_LONGEST // 2)))))
        return -(-steps // share)


TILES = {  # keys: compute capabilities, (0, 0) for others
    (0, 0): {CODE4: Tiles(64, 4, 528, 4, 3), INT8: Tiles(64, 2, 528, 4, 4), FLOAT: Tiles(64, 1, 528, 4, 4)},
    (9, 0): {CODE4: Tiles(128, 4, 528, 4, 2), INT8: Tiles(64, 2, 264, 4, 4), FLOAT: Tiles(64, 2, 264, 4, 3)},
}


class RowLinear(nn.Module):
    """A frozen linear layer in a stored form: `[..., inputs]` to `[..., outputs]`. `tensors`: see `product`."""

    weight: Tensor

    def __init__(self, form: str, tensors: Mapping[str, Tensor], inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype
        self.in_features, self.out_features = inputs, len(tensors["weight"])
        self.width = inputs + -inputs % _BLOCK if form != FLOAT else inputs
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(self.named_buffers())

    def release(self) -> None:
        self._buffers.clear()

    @torch.no_grad()
    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, self.in_features)
        few = len(flat) <= FEW_ROWS
        out = self._product(flat) if few else F.linear(flat, self.expanded(), self._buffers.get("bias"))
        return out.view(*rows.shape[:-1], self.out_features)

    def expanded(self) -> Tensor:
        if self.form == FLOAT:
            return self.weight
        from specdemo.models.engines.row_kernels import expand

        out = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self.weight.device)
        grid = -(-self.out_features // FEW_ROWS), self.width // _BLOCK
        nested = "groups" in self._buffers
        sizes = self.out_features, self.in_features, self.width
        expand[grid](*self._arguments(), out, *sizes, CODES=self.form == CODE4, NESTED=nested)
        return out

    def _product(self, rows: Tensor) -> Tensor:
        from specdemo.models.engines.row_kernels import product, total

        device, bias = rows.device, self._buffers.get("bias")
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        tiles = TILES.get(capability, TILES[0, 0])[self.form]
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        splits = tiles.splits(self.out_features, self.width)
        sums = torch.empty(splits, len(rows), self.out_features, dtype=torch.float32, device=device)
        grid = -(-self.out_features // tiles.outputs), splits
        sizes = len(rows), self.out_features, self.in_features, self.width, rows.stride(0), splits
        options: dict[str, Any] = {"OUTPUTS": tiles.outputs, "BLOCKS": tiles.blocks}
        options |= {"EVEN": self.in_features % (_BLOCK * tiles.blocks) == 0, "NESTED": "groups" in self._buffers}
        options |= {"DECODE": decoding(self.dtype) if self.form == CODE4 and device.type != "cpu" else ""}
        options |= {"num_warps": tiles.warps, "num_stages": tiles.stages}
        product[grid](rows, *self._arguments(), sums, *sizes, FORM=self.form, **options)
        out = torch.empty(len(rows), self.out_features, dtype=self.dtype, device=device)
        grid = -(-self.out_features // 256), len(rows)
        total[grid](sums, bias, out, len(rows), self.out_features, splits, BIASED=bias is not None, WIDTH=256)
        return out

    def _arguments(self) -> list[Tensor]:
        """Return the tensors of a kernel; it ignores other forms."""
        stored = self.tensors
        return [stored.get(name, self.weight) for name in _ARGUMENTS]


def can_join(linears: Sequence[nn.Module]) -> bool:
    forms = {
        (linear.form, *sorted(linear.tensors.keys() - {"bias"})) if isinstance(linear, RowLinear) else None
        for linear in linears
    }
    return len(forms) == 1 and None not in forms


def joined_outputs(parts: Sequence[RowLinear]) -> RowLinear:
    first = parts[0]
    if len(parts) == 1:
        return first
    tensors = dict(first.tensors)
    for name in tensors.keys() & {"weight", "groups", "scales"}:
        tensors[name] = torch.cat([part.tensors[name] for part in parts], -1 if name == "scales" else 0)
    if "starts" in tensors:  # positions in the joined `groups`
        counts = torch.tensor([0, *(len(part.tensors["groups"]) for part in parts[:-1])])
        firsts = (_NESTED_BLOCK * counts.cumsum(0)).tolist()
        starts = [part.tensors["starts"] + first for part, first in zip(parts, firsts, strict=True)]
        tensors["starts"] = torch.cat(starts)
    if any("bias" in part.tensors for part in parts):
        zeros = partial(torch.zeros, dtype=first.dtype, device=first.weight.device)
        tensors["bias"] = torch.cat([part.tensors.get("bias", zeros(part.out_features)) for part in parts])
    return RowLinear(first.form, tensors, first.in_features, first.dtype)


def float_linear(weight: Tensor, bias: Tensor | None) -> RowLinear:
    tensors = {"weight": weight} | ({} if bias is None else {"bias": bias})
    return RowLinear(FLOAT, tensors, weight.shape[1], weight.dtype)


def int8_linear(codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> RowLinear:
    """`codes` `[outputs, inputs]`, `scales` `[outputs]`."""
    blocks = F.pad(codes, (0, -codes.shape[1] % _BLOCK)).unflatten(1, (-1, 8, 4, 2))
    tensors = {"weight": blocks.transpose(2, 3).flatten(1).contiguous(), "scales": scales.float()}
    return RowLinear(INT8, tensors | _bias(bias, dtype), codes.shape[1], dtype)


def nf4_linear(packed: Tensor, scales: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> RowLinear:
    """`packed` `[outputs, inputs / 2]`: even inputs in the upper halves of bytes.

    `scales`: `absmax` by block of inputs; if it is bytes, also `levels`, their `absmax` by 256 scales, and `offset`.
    """
    order = torch.tensor(_paired_codes(dtype), device=packed.device)
    renamed = torch.argsort(order).to(torch.uint8)
    codes = torch.stack((renamed[(packed >> 4).int()], renamed[(packed & 15).int()]), -1).flatten(1)
    high, low = codes.unflatten(1, (-1, 2, _BLOCK // 2)).unbind(2)
    pairs = (high << 4 | low).unflatten(2, (4, 4, 2)).transpose(2, 3).flatten(1).contiguous()
    values = _FACTORS[dtype] * torch.tensor(NF4_CODES, dtype=torch.float32, device=packed.device)[order]
    outputs, blocks = len(packed), codes.shape[1] // _BLOCK
    stored = scales["absmax"].view(outputs, blocks)
    tensors = {"weight": pairs, "values": values}
    if stored.dtype != torch.uint8:
        tensors["scales"] = (stored.float() / _FACTORS[dtype]).T.contiguous()
        return RowLinear(CODE4, tensors | _bias(bias, dtype), codes.shape[1], dtype)
    factors = scales["nested_absmax"].float() / _FACTORS[dtype]
    offsets = scales["offset"].float().expand(len(factors)) / _FACTORS[dtype]
    words = F.pad(stored, (0, -blocks % _WORD)).contiguous().view(torch.int32)
    tensors |= {
        "scales": words.T.contiguous(),
        "levels": scales["levels"].float(),
        "groups": F.pad(torch.stack((factors, offsets), 1), (0, 0, 0, 1)),  # a partial sum may end before the last
        "starts": blocks * torch.arange(outputs, dtype=torch.int32, device=packed.device),
    }
    return RowLinear(CODE4, tensors | _bias(bias, dtype), codes.shape[1], dtype)


def _bias(bias: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    return {} if bias is None else {"bias": bias.detach().to(dtype)}


def _bits(dtype: torch.dtype) -> list[int]:
    values = _FACTORS[dtype] * torch.tensor(NF4_CODES, dtype=torch.float64)
    values[7] = -0.0  # the sign is free
    return [bits & 0xFFFF for bits in values.to(dtype).view(torch.int16).tolist()]


@cache
def _paired_codes(dtype: torch.dtype) -> list[int]:
    """Return an order of the codes: codes i and i + 8 have equal sign bits in both bytes of their values."""
    bits = _bits(dtype)
    order = sorted(range(16), key=lambda code: (bits[code] & 0x8080, code))
    return order[::2] + order[1::2]


@cache
def decoding(dtype: torch.dtype) -> str:
    """Return PTX that maps four bytes to the values of their upper and of their lower codes.

    `prmt` looks up four codes at a time: where bit 3 of a code is set, it returns the sign of the table's byte in all
    bits. The second table has no signs, so that the first restores them.
    """
    bits = [_bits(dtype)[code] for code in _paired_codes(dtype)]
    tables = []
    for shift in (8, 0):
        plane = [bit >> shift & 255 for bit in bits]
        plane[8:] = [byte ^ 255 * (byte >> 7) for byte in plane[8:]]
        tables += [int.from_bytes(plane[first : first + 4], "little") for first in range(0, 16, 4)]
    lines = ["{", ".reg .b32 s, t, u, a, b, h, l;"]
    lines += ["xor.b32 s, $4, 0x88888888;", "shr.u32 t, $4, 16;", "shr.u32 u, s, 16;"]
    for result, (first, second) in enumerate((("$4", "s"), ("t", "u"))):
        for byte, (a, b, c, d) in (("h", tables[:4]), ("l", tables[4:])):
            lines += [f"prmt.b32 a, {a}, {b}, {first};", f"prmt.b32 b, {c}, {d}, {second};", f"xor.b32 {byte}, a, b;"]
        lines += [f"prmt.b32 ${result}, l, h, 0x7351;", f"prmt.b32 ${result + 2}, l, h, 0x6240;"]
    return "\n".join((*lines, "}"))


def kernels_missing(device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why `row_kernels` cannot run, or an empty string."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return "no NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "the GPU is older than Ampere"
    if dtype not in _FACTORS:
        return f"no kernels for {dtype}".replace("torch.", "")
    return _trial_failure(device, dtype)


@cache
def _trial_failure(device: torch.device, dtype: torch.dtype) -> str:
    """Compile and run a kernel: it needs a C compiler."""
    try:
        float_linear(torch.zeros(_BLOCK, _BLOCK, dtype=dtype, device=device), None)(
            torch.zeros(1, _BLOCK, dtype=dtype, device=device)
        )
    except Exception as error:  # any error of Triton's compiler
        return f"Triton does not run: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return ""


def from_bitsandbytes(linear: Any, dtype: torch.dtype) -> RowLinear | None:
    weight: Any = getattr(linear, "weight", None)
    state = getattr(weight, "quant_state", None)
    if state is None:
        if getattr(weight, "SCB", None) is None:
            return None
        return int8_linear(weight.CB.detach(), weight.SCB.detach().float() / 127, linear.bias, dtype)
    outputs, inputs = state.shape
    blocks = [state.blocksize, state.state2.blocksize if state.nested else _NESTED_BLOCK]
    if state.quant_type != "nf4" or blocks != [_BLOCK, _NESTED_BLOCK] or inputs % _BLOCK:
        return None
    scales = {"absmax": state.absmax}
    if state.nested:
        scales |= {"levels": state.state2.code, "nested_absmax": state.state2.absmax, "offset": state.offset}
    packed = weight.detach().view(torch.uint8).view(outputs, inputs // 2)
    return nf4_linear(packed, scales, linear.bias, dtype)


def replace_linears(model: nn.Module, dtype: torch.dtype) -> None:
    for module in list(model.modules()):
        children: list[tuple[str, Any]] = list(module.named_children())
        for name, child in children:
            if (converted := from_bitsandbytes(child, dtype)) is not None:
                setattr(module, name, converted)
