"""Linear layers in the layout of the native CPU engine, see `matrix` in `native/interface.h`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdemo.models.engines.gguf_linear import GgufLinear, separated
from specdemo.models.memory import LargePageBuffer
from specdemo.native.build import required_library
from specdemo.native.interface import MatrixStruct

_GROUP = 64  # bitsandbytes: 4-bit weights per scale
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8, _CODE4 = 3, 4
STORED_FORMS = {"Q8_0": 5, "Q4_0": 6, "Q4_1": 7, "Q4_K": 8, "Q6_K": 9}  # of GGUF files


class NativeMatrix:
    """Weights `[outputs, inputs]` in the layout of `matrix` in the C source."""

    def __init__(
        self,
        linears: Sequence[nn.Module],
        buffer: LargePageBuffer,
        interleaved: bool = False,
        order: Tensor | None = None,
    ) -> None:
        """Join `linears`; `interleaved`: blocks alternate; `order`: of outputs."""
        library = required_library()
        self._block: int = library.block_outputs()
        self._lanes: int = library.vector_outputs()
        self.tensors: dict[str, Tensor] = {}
        parts = [_stored(linear, order) for linear in linears]
        sizes = [len(part["weights"]) for part in parts]
        self.outputs, self.inputs = sum(sizes), parts[0]["weights"].shape[1]
        self.form: int = parts[0].pop("form")
        for part in parts[1:]:
            if part.pop("form") != self.form:
                raise ValueError("joined matrices need one number format")
        if interleaved:
            self.outputs = len(linears) * self._block * -(-sizes[0] // self._block)
            parts = [{name: self._whole(value) for name, value in part.items()} for part in parts]
        if self.form == FORMS[torch.float32]:
            self._narrow(parts)
        for name in parts[0]:
            values = [part[name] for part in parts]
            if name == "codes":
                self.tensors[name], self.tensors["code_bytes"] = values[0], torch.empty(32, dtype=torch.uint8)
                library.set_code_bytes(*(self.tensors[n].data_ptr() for n in ("codes", "code_bytes")))
                continue
            if interleaved:
                blocks = [value.unflatten(0, (-1, self._block)) for value in values]
                joined = torch.stack(blocks, 1).flatten(0, 2)
            else:
                joined = self._whole(torch.cat(values) if len(values) > 1 else values[0])
            self.tensors[name] = joined
        self.tensors["weights"] = buffer.place(self._blocks(self.tensors["weights"]))
        if self.form >= _CODE4:
            self.tensors["scales"] = self._transposed(self.tensors["scales"])

    def _narrow(self, parts: list[dict[str, Any]]) -> None:
        for dtype in (torch.float16, torch.bfloat16):
            narrow = [part["weights"].to(dtype) for part in parts]
            if all(torch.equal(part["weights"], weights.float()) for part, weights in zip(parts, narrow, strict=True)):
                self.form = FORMS[dtype]
                for part, weights in zip(parts, narrow, strict=True):
                    part["weights"] = weights
                return

    def _blocks(self, weights: Tensor) -> Tensor:
        if self.form in (_INT8, STORED_FORMS["Q8_0"], STORED_FORMS["Q6_K"]):  # [blocks, inputs / 4, outputs, input]
            if self.form == _INT8:
                self.tensors["sums"] = weights.sum(1, dtype=torch.int32)
            quads = F.pad(weights, (0, -self.inputs % 4)).unflatten(0, (-1, self._block)).unflatten(2, (-1, 4))
            return quads.transpose(1, 2).contiguous()
        if self.form > _CODE4:  # [blocks, inputs / 8, outputs, input, upper pairs]
            words = weights.unflatten(0, (-1, self._block)).unflatten(2, (-1, 2, 2, 2)).permute(0, 2, 1, 5, 3, 4)
            return (words[..., 0] | words[..., 1] << 4).flatten(1).contiguous()
        blocks = self._transposed(weights)  # [blocks, inputs, outputs]
        if self.form == FORMS[torch.bfloat16]:
            return blocks.unflatten(2, (-1, 2, self._lanes)).transpose(3, 4).flatten(2).contiguous()
        if self.form != _CODE4:
            return blocks
        # [blocks, inputs / 4, pair of inputs, input, two vectors, vector, four outputs, output], see `position`
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

    def struct(self) -> MatrixStruct:
        pointers = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}
        return MatrixStruct(form=self.form, outputs=self.outputs, inputs=self.inputs, **pointers)


def form_of(linear: nn.Module) -> int:
    """Return the number format of a linear layer."""
    if isinstance(linear, GgufLinear):
        return FORMS[linear.dtype] if linear.dtype else STORED_FORMS[linear.kind]
    if getattr(linear.weight, "quant_state", None) is not None:
        return _CODE4
    return _INT8 if linear.weight.dtype == torch.int8 else FORMS[linear.weight.dtype]


def _stored(linear: nn.Module, order: Tensor | None) -> dict[str, Any]:
    """Return the stored values of a linear layer: `weights` `[outputs, inputs]`, `scales`, `codes` and `bias`."""
    form = form_of(linear)
    weight = linear.expanded() if isinstance(linear, GgufLinear) else linear.weight
    if form > _CODE4:
        part = separated(linear.kind, weight)
    elif form == _CODE4:
        part = _four_bit(weight, weight.quant_state)
    elif form == _INT8:
        part = {"weights": weight.CB.detach(), "scales": weight.SCB.detach().float() / 127}
    else:
        part = {"weights": weight.detach().T if isinstance(linear, Conv1D) else weight.detach()}
    part["form"] = form
    if getattr(linear, "bias", None) is not None:
        part["bias"] = linear.bias.detach().to(torch.float32, copy=True)
    if order is not None:
        part |= {name: part[name][order] for name in ("weights", "scales", "bias") if name in part}
    return part


def _four_bit(weight: Tensor, state: Any) -> dict[str, Tensor]:
    """Return codes and scales of bitsandbytes (2305.14314): even inputs are stored in the upper half of a byte."""
    from bitsandbytes.functional import dequantize_blockwise

    outputs, inputs = state.shape
    data = weight.detach().flatten()
    codes = torch.stack((data >> 4, data & 15), 1).view(outputs, inputs)
    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    return {
        "weights": codes,
        "scales": scales.float().view(outputs, inputs // _GROUP),
        "codes": state.code.to(torch.float32, copy=True),
    }
