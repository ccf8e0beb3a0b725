"""Linear layers in the layout of the native CPU engine, see `matrix` in `native/interface.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdemo.models.engines.gguf_linear import GgufLinear, separated
from specdemo.models.memory import LargePageBuffer
from specdemo.native.build import required_library
from specdemo.native.interface import FORMATS, Format, MatrixStruct

_WORD_CODES = 16  # lanes of vectors with which codes are stored like other integers, see `coded_products.c`
FLOAT_FORMATS = {torch.float32: FORMATS["F32"], torch.bfloat16: FORMATS["BF16"], torch.float16: FORMATS["F16"]}


class NativeMatrix:
    """Weights `[outputs, inputs]` in the layout of `matrix` in the C source."""

    def __init__(
        self,
        linears: Sequence[nn.Module],
        buffer: LargePageBuffer,
        interleaved: bool = False,
        order: Tensor | None = None,
    ) -> None:
        """Store linear layers as one matrix; `interleaved`: blocks alternate; `order`: permutation of outputs.

        Raises `ValueError` for layers of different number formats.
        """
        library = required_library()
        self._block: int = library.block_outputs()
        self._lanes: int = library.vector_outputs()
        self.tensors: dict[str, Tensor] = {}
        formats = [format_of(linear) for linear in linears]
        if len(set(formats)) > 1:
            raise ValueError("joined matrices need one number format")
        self.format, self._byte_inputs = formats[0], getattr(linears[0], "byte_inputs", False)
        parts = [_stored(linear, self.format, order) for linear in linears]
        if any("bias" in part for part in parts):
            for part in parts:
                part.setdefault("bias", torch.zeros(len(part["weights"]), dtype=torch.float32))
        if interleaved:
            parts = [{name: x if name == "codes" else self._whole(x) for name, x in part.items()} for part in parts]
        self.outputs = sum(len(part["weights"]) for part in parts)
        self.inputs = parts[0]["weights"].shape[1]
        if self.format.name == "F32":
            self._store_in_16_bits(parts)
        for name in parts[0]:
            values = [part[name] for part in parts]
            if name == "codes":
                self.tensors["codes"] = values[0]
                self.tensors["code_bytes"] = torch.empty(32, dtype=torch.uint8)
                library.set_code_bytes(values[0].data_ptr(), self.tensors["code_bytes"].data_ptr())
            elif interleaved:
                blocks = [value.unflatten(0, (-1, self._block)) for value in values]
                self.tensors[name] = torch.stack(blocks, 1).flatten(0, 2)
            else:
                self.tensors[name] = self._whole(torch.cat(values) if len(values) > 1 else values[0])
        self.tensors["weights"] = buffer.place(self._blocks(self.tensors["weights"]))
        if self.format.group:
            self.tensors["scales"] = self._transposed(self.tensors["scales"])

    def _store_in_16_bits(self, parts: list[dict[str, Any]]) -> None:
        for dtype in (torch.float16, torch.bfloat16):
            narrow = [part["weights"].to(dtype) for part in parts]
            if all(torch.equal(part["weights"], weights.float()) for part, weights in zip(parts, narrow, strict=True)):
                self.format = FLOAT_FORMATS[dtype]
                for part, weights in zip(parts, narrow, strict=True):
                    part["weights"] = weights
                return

    def _blocks(self, weights: Tensor) -> Tensor:
        if self.format.has_bytes:  # layout [blocks, inputs / 4, outputs, input]
            unsigned = weights.view(torch.uint8) ^ 128
            quads = F.pad(unsigned, (0, -self.inputs % 4)).unflatten(0, (-1, self._block)).unflatten(2, (-1, 4))
            return quads.transpose(1, 2).contiguous()
        # layout [blocks, inputs / 8, outputs, input, upper four]
        if self.format.is_coded and not (self.format.has_codes and self._lanes < _WORD_CODES):
            fours = weights.unflatten(0, (-1, self._block)).unflatten(2, (-1, 2, 4)).permute(0, 2, 1, 4, 3)
            return (fours[..., 0] | fours[..., 1] << 4).flatten(1).contiguous()
        blocks = self._transposed(weights)  # layout [blocks, inputs, outputs]
        if self.format.name == "BF16":
            return blocks.unflatten(2, (-1, 2, self._lanes)).transpose(3, 4).flatten(2).contiguous()
        if not self.format.has_codes:
            return blocks
        # layout: [blocks, inputs / 4, pair of inputs, input, two vectors, vector, four outputs, output], see `position`
        parts = blocks.unflatten(1, (-1, 2, 2)).unflatten(4, (-1, 2, self._lanes // 4, 4))
        parts = parts.permute(0, 1, 2, 4, 6, 5, 7, 3)
        return (parts[:, :, 0] | parts[:, :, 1] << 4).flatten(1).contiguous()

    def _transposed(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (-1, self._block)).movedim(1, -1).contiguous()

    def _whole(self, values: Tensor) -> Tensor:
        missing = -len(values) % self._block
        return torch.cat((values, values.new_zeros(missing, *values.shape[1:]))) if missing else values

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the weights `[n, inputs]` of `outputs` `[n]`. Raises `IndexError`."""
        if len(outputs) and not (0 <= int(outputs.min()) and int(outputs.max()) < self.outputs):
            raise IndexError(f"a matrix of {self.outputs:,} outputs has no output {int(outputs.max()):,}")
        rows, wanted = torch.empty(len(outputs), self.inputs, dtype=torch.float32), outputs.to(torch.int64).contiguous()
        required_library().matrix_rows(ctypes.byref(self.struct()), wanted.data_ptr(), len(wanted), rows.data_ptr())
        return rows

    def struct(self) -> MatrixStruct:
        self._struct.outputs = self.outputs
        return self._struct

    @cached_property
    def _struct(self) -> MatrixStruct:
        pointers = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}
        return MatrixStruct(form=self.format.number, inputs=self.inputs, byte_inputs=self._byte_inputs, **pointers)


class WritableMatrix(NativeMatrix):
    """Matrix `[outputs, inputs]` whose outputs are written as floats; `form`: F32, INT8, Q8_0 or Q4_0.

    Matrices with a scale per group of inputs are multiplied by activations of 8 bits.
    """

    def __init__(self, outputs: int, inputs: int, form: Format, buffer: LargePageBuffer) -> None:
        self._block = required_library().block_outputs()
        self.format, self._byte_inputs = form, form.group > 0
        self.outputs, self.inputs = outputs, inputs
        whole, stored = outputs + -outputs % self._block, inputs + -inputs % 4 if form.has_bytes else inputs
        self.tensors = {"weights": buffer.place(torch.zeros(whole * stored * form.bits // 8, dtype=torch.uint8))}
        if form.scales:
            count = whole * (inputs // form.group if form.group else 1)
            self.tensors["scales"] = torch.zeros(count, dtype=torch.float16 if form.scale_bits == 16 else torch.float32)

    def extended(self, most: int) -> WritableMatrix:
        """Return a copy with space for `most` further outputs; set `outputs` before writing them."""
        copied = WritableMatrix(self.outputs + most, self.inputs, self.format, LargePageBuffer(0))
        for name, stored in self.tensors.items():  # by blocks of outputs
            copied.tensors[name][: len(stored)] = stored
        copied.outputs = self.outputs
        return copied

    def copy_rows(self, source: NativeMatrix, ids: Tensor, first: int) -> None:
        """Store the rows `ids[first:]` of `source` as outputs from `first` on; `ids`: int32."""
        address = ids.data_ptr() + first * ids.element_size()
        if required_library().copy_rows(
            ctypes.byref(source.struct()), address, len(ids) - first, ctypes.byref(self.struct()), first
        ):
            raise ValueError(f"a matrix of {source.outputs:,} outputs has no outputs {ids[first:].tolist()}")

    def write(self, rows: Tensor) -> None:
        """Store `rows` `[outputs, inputs]`."""
        values = rows.float().contiguous()
        required_library().write_rows(ctypes.byref(self.struct()), 0, len(values), values.data_ptr())


def format_of(linear: nn.Module) -> Format:
    if isinstance(linear, GgufLinear):
        return FLOAT_FORMATS[linear.dtype] if linear.dtype else FORMATS[linear.kind]
    weight: Any = linear.weight
    if getattr(weight, "quant_state", None) is not None:
        return FORMATS["CODE4"]
    return FORMATS["INT8"] if weight.dtype == torch.int8 else FLOAT_FORMATS[weight.dtype]


def _stored(linear: nn.Module, form: Format, order: Tensor | None) -> dict[str, Tensor]:
    weight: Any = linear.expanded() if isinstance(linear, GgufLinear) else linear.weight
    part: dict[str, Tensor]
    if isinstance(linear, GgufLinear) and form.is_coded:
        part = separated(linear.kind, weight)
    elif form.has_codes:
        part = _four_bit(weight, form.group)
    elif form.name == "INT8":
        part = {"weights": weight.CB.detach(), "scales": weight.SCB.detach().float() / 127}
    else:
        part = {"weights": weight.detach().T if isinstance(linear, Conv1D) else weight.detach()}
    bias: Any = getattr(linear, "bias", None)
    if bias is not None:
        part["bias"] = bias.detach().to(torch.float32, copy=True)
    if order is not None:
        part |= {name: part[name][order] for name in ("weights", "scales", "bias") if name in part}
    return part


def _four_bit(weight: Any, group: int) -> dict[str, Tensor]:
    """Return codes and scales of bitsandbytes (2305.14314): even inputs are stored in the upper half of a byte."""
    from bitsandbytes.functional import dequantize_blockwise

    state = weight.quant_state
    outputs, inputs = state.shape
    data = weight.detach().flatten()
    codes = torch.stack((data >> 4, data & 15), 1).view(outputs, inputs)
    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    return {
        "weights": codes,
        "scales": scales.float().view(outputs, inputs // group),
        "codes": state.code.to(torch.float32, copy=True),
    }
