"""Native CPU engine, see `native/pass.c`.

Batch-invariant by construction: the bits of a row do not depend on the other rows, their number or the threads.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdemo.core.step import Draft
from specdemo.models.engines.fused_weights import FusedWeights
from specdemo.models.engines.generic import positions
from specdemo.models.engines.gguf_linear import GgufLinear, separated
from specdemo.models.engines.native_families import ACTIVATIONS, LayerParts, model_parts
from specdemo.models.memory import LargePageBuffer
from specdemo.native.build import native_library, required_library
from specdemo.native.interface import (
    ChainStruct,
    LayerStruct,
    MatrixStruct,
    ModelStruct,
    PassStruct,
    check_model,
    check_result,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdemo.core.sampling import ChainSampler

_GROUP = 64  # bitsandbytes: 4-bit weights per scale
NATIVE_CHUNK = 256  # prompt rows per pass
KEPT_ROWS = 16  # rows of the retained scratch buffer
_HEAD_PADDING = 16
FIRST_CAPACITY = 256
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8, _CODE4 = 3, 4
STORED_FORMS = {"Q8_0": 5, "Q4_0": 6, "Q4_1": 7, "Q4_K": 8, "Q6_K": 9}  # of GGUF files


def uses_native_engine(device: torch.device) -> bool:
    return device.type == "cpu" and isinstance(native_library(), ctypes.CDLL)


def kv_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


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


def _form(linear: nn.Module) -> int:
    if isinstance(linear, GgufLinear):
        return FORMS[linear.dtype] if linear.dtype else STORED_FORMS[linear.kind]
    if getattr(linear.weight, "quant_state", None) is not None:
        return _CODE4
    return _INT8 if linear.weight.dtype == torch.int8 else FORMS[linear.weight.dtype]


def _stored(linear: nn.Module, order: Tensor | None) -> dict[str, Any]:
    """Return the stored values of a linear layer: `weights` `[outputs, inputs]`, `scales`, `codes` and `bias`."""
    form = _form(linear)
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


class NativeWeights(FusedWeights):
    batch_invariant = True

    def __init__(self, model: PreTrainedModel, consume: bool = False) -> None:
        """`consume`: release each matrix of `model` when converted."""
        parts = model_parts(model)
        super().__init__(model, parts.angles)
        if len(parts.layers[0].qkv) == 1:
            self.kv_heads = self.heads
        self.layers = list(range(len(parts.layers)))
        self._kept: list[Any] = []
        self._buffer = LargePageBuffer()
        self._consume, self._gain_offset = consume, parts.gain_offset
        tied = model.lm_head.weight is parts.embedding.weight
        self._embedding = None if tied else self._matrix([parts.embedding])
        self.embedding = self._embedding and self._embedding.tensors["weights"]
        self._positions = parts.positions and self._matrix([parts.positions])
        self.position_limit = self._positions.outputs if self._positions else sys.maxsize
        self._leave = self._gain(parts.leave)
        self._structs = (LayerStruct * len(parts.layers))(*map(self._layer, parts.layers))
        self._head = self._matrix([model.lm_head])
        self._options = {
            "inner": parts.inner,
            "rotated": 2 * self.rotation(1)[0].shape[1],
            "activation": ACTIVATIONS[parts.activation],
            "gated": len(parts.layers[0].gate_up) > 1,
            "centred": hasattr(parts.leave, "bias"),
            "parallel": parts.parallel,
            "epsilon": parts.epsilon,
            "embedding_scale": parts.embedding_scale,
            "attention_cap": parts.attention_cap or 0,
            "logit_cap": parts.logit_cap or 0,
        }

    @property
    def weight_bytes(self) -> int:
        return sum(part.nbytes for part in self._kept)

    def with_channel_scale(self, scale: Tensor) -> NativeWeights:
        thin = super().with_channel_scale(scale)
        thin.channel_scale = scale.float().contiguous()
        return thin

    def rotation(self, count: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[count, rotated / 2]`."""
        if self._angles is None:
            return torch.empty(count, 0), torch.empty(count, 0)
        cosines, sines = self._angles(torch.empty(0), torch.arange(count)[None])
        half = cosines.shape[-1] // 2
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    def struct(self) -> tuple[ModelStruct, Any]:
        embedding, placed = (
            matrix and ctypes.pointer(matrix.struct()) for matrix in (self._embedding, self._positions)
        )
        size = ctypes.sizeof(LayerStruct)
        pointers = (ctypes.c_void_p * len(self.layers))(
            *(ctypes.addressof(self._structs) + size * i for i in self.layers)
        )
        return ModelStruct(
            layers=ctypes.addressof(pointers),
            embedding=embedding and ctypes.addressof(embedding.contents),
            positions=placed and ctypes.addressof(placed.contents),
            channel_scale=None if self.channel_scale is None else self.channel_scale.data_ptr(),
            leave=self._leave.data_ptr(),
            head=self._head.struct(),
            layer_count=len(self.layers),
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            cache_form=FORMS[kv_dtype(self.dtype)],
            **self._options,
        ), (pointers, embedding, placed)

    def _keep(self, part: Any) -> Any:
        self._kept.append(part)
        return part

    def _gain(self, norm: nn.Module) -> Tensor:
        gain = norm.weight.detach().float()
        gain = gain + self._gain_offset if self._gain_offset else gain.clone()
        biased = hasattr(norm, "bias")
        return self._keep(torch.cat((gain, norm.bias.detach().float())) if biased else gain)

    def _matrix(
        self, linears: Sequence[nn.Module], interleaved: bool = False, order: Tensor | None = None
    ) -> NativeMatrix:
        matrix = self._keep(NativeMatrix(linears, self._buffer, interleaved, order))
        if self._consume:
            for linear in linears:
                linear.weight = None
        return matrix

    def _layer(self, layer: LayerParts) -> LayerStruct:
        separate_value = len({_form(linear) for linear in layer.qkv}) > 1
        return LayerStruct(
            qkv=self._matrix(layer.qkv[:-1] if separate_value else layer.qkv, order=layer.order).struct(),
            value=self._matrix(layer.qkv[-1:]).struct() if separate_value else MatrixStruct(),
            out=self._matrix([layer.out]).struct(),
            gate_up=self._matrix(layer.gate_up, interleaved=len(layer.gate_up) > 1).struct(),
            down=self._matrix([layer.down]).struct(),
            attention_scale=layer.scale,
            window=layer.window or 0,
            **{name: self._gain(norm).data_ptr() for name, norm in layer.norms.items()},
        )


class _KvCache:
    """Keys and values `[layers, heads, positions, values]` and rotations."""

    def __init__(self, model: NativeWeights) -> None:
        self._rotation = model.rotation
        self.capacity = self.written = 0
        padded = model.head_dim + -model.head_dim % _HEAD_PADDING
        self.kv = torch.zeros(len(model.layers), 2 * model.kv_heads, 0, padded, dtype=kv_dtype(model.dtype))

    def reserve(self, end: int) -> None:
        if end <= self.capacity:
            return
        capacity = max(FIRST_CAPACITY, 2 * self.capacity, end)
        kv = torch.zeros(*self.kv.shape[:2], capacity, self.kv.shape[3], dtype=self.kv.dtype)
        kv[:, :, : self.capacity] = self.kv
        self.kv, self.capacity = kv, capacity
        self.cosines, self.sines = self._rotation(capacity)


def _visible(rows: int, held: int, draft: Draft) -> tuple[Sequence[int], ...]:
    """Return `positions`, `prefix`, `extra` and `extra_start` of a pass in the C source."""
    if draft.is_chain:
        return range(held, held + rows), range(held + 1, held + rows + 1), (), [0] * (rows + 1)
    text = held + rows - len(draft)  # length of the text before the draft
    paths = [draft.path(node) for node in range(max(0, held - text), len(draft))]  # of the new nodes
    extra: list[int] = []
    starts = [0] * (rows - len(paths) + 1)
    for path in paths:
        extra += [text + ancestor for ancestor in path]
        starts.append(len(extra))
    return positions(rows, held, draft), [*range(held + 1, text + 1), *[text] * len(paths)], extra, starts


class NativeEngine:
    """Passes over the KV cache of one request."""

    def __init__(self, model: NativeWeights, owner: NativeEngine | None = None) -> None:
        self._library, self._model = required_library(), model
        self._struct, self._pointers = model.struct()
        self._length = 0
        self._cache = owner._cache if owner else _KvCache(model)
        self._struct.cache_form = FORMS[self._cache.kv.dtype]
        check_model(self._library, self._struct)
        self._address = ctypes.addressof(self._struct)
        self._vocab_size = model.config.vocab_size
        self.hidden: Tensor | None = None  # [layers, rows, width] of the last pass
        self._scratch = self._buffer(KEPT_ROWS)
        self.threads = torch.get_num_threads()

    def run(self, new: list[int] | Tensor, held: int, draft: Draft, layers: Sequence[int] = ()) -> Tensor:
        """See `CacheEngine.run`. `layers`: store their hidden states `[layers, rows, width]` in `hidden`."""
        new = new.tolist() if isinstance(new, Tensor) else new
        while len(new) > NATIVE_CHUNK + len(draft):
            self._pass(new[:NATIVE_CHUNK], held, Draft(), 0, ())
            new, held = new[NATIVE_CHUNK:], held + NATIVE_CHUNK
        return self._pass(new, held, draft, min(len(new), len(draft) + 1), layers)

    def keep(self, length: int, slots: list[int]) -> None:
        end = length + len(slots)
        if slots and slots != list(range(length, end)):
            kv = self._cache.kv
            kv[:, :, length:end] = kv[:, :, torch.tensor(slots)]
        self._length = end

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero the cache, so that texts do not outlive their request."""
        self._cache.kv[:, :, : self._cache.written].zero_()
        self._length = self._cache.written = 0

    @property
    def kv_bytes(self) -> int:
        kv = self._cache.kv
        return kv.nbytes // kv.shape[2] * self._length if kv.shape[2] else 0

    @property
    def reserved_bytes(self) -> int:
        return self._cache.kv.nbytes

    def sample_chain(self, new: list[int], held: int, count: int, sampler: ChainSampler) -> list[int] | None:
        """Feed `new` after `held` positions and sample `count` tokens; None: not possible in one call."""
        vocab, sampling = sampler.vocab_size, sampler.sampling
        end = held + len(new) + count - 1
        if len(new) > KEPT_ROWS or vocab > self._vocab_size or end > self._model.position_limit:
            return None
        if (uniforms := sampler.uniforms(count)) is None:
            return None
        self._cache.reserve(end)
        tokens, peaks, chosen = (ctypes.c_int32 * count)(), *((ctypes.c_float * count)() for _ in range(2))
        probs = torch.empty(count, vocab) if uniforms else None
        numbers, scratch = array("d", uniforms), torch.empty(vocab if uniforms else 0)
        chain = ChainStruct(
            sampling.top_p,
            numbers.buffer_info()[0],
            None if probs is None else probs.data_ptr(),
            scratch.data_ptr(),
            ctypes.addressof(peaks),
            ctypes.addressof(chosen),
            ctypes.addressof(tokens),
            sampling.top_k,
            vocab,
            sampling.temperature,
            count,
        )
        logits = torch.empty(1, self._vocab_size)
        self._run(self._library.draft_chain, new, held, Draft(), logits, (), chain)
        self._set_length(end)
        sampler.record(peaks[:], chosen[:], probs)
        return tokens[:]

    def _pass(self, new: list[int], held: int, draft: Draft, last: int, layers: Sequence[int]) -> Tensor:
        logits = torch.empty(last, self._vocab_size)
        self._run(self._library.run_pass, new, held, draft, logits, layers)
        self._set_length(held + len(new))
        return logits

    def _set_length(self, length: int) -> None:
        self._length, self._cache.written = length, max(length, self._cache.written)

    def _run(
        self,
        function: Callable[..., int],
        new: list[int],
        held: int,
        draft: Draft,
        logits: Tensor,
        layers: Sequence[int],
        *options: ctypes.Structure,
    ) -> None:
        model, cache, rows = self._model, self._cache, len(new)
        cache.reserve(held + rows)
        placed, prefix, extra, starts = _visible(rows, held, draft)
        if max(placed) >= model.position_limit:
            raise ValueError(f"the model has {model.position_limit} positions")
        taps = [layers.index(i) if i in layers else -1 for i in range(len(model.layers))] if layers else ()
        self.hidden = torch.empty(len(layers), rows, model.width) if layers else None
        scratch = self._scratch if rows <= KEPT_ROWS else self._buffer(rows)
        numbers = array("i", [*new, *placed, *prefix, *extra, *starts, *taps])
        ends = accumulate(map(len, (new, placed, prefix, extra, starts)), initial=0)
        places = [numbers.buffer_info()[0] + numbers.itemsize * end for end in ends]
        described = PassStruct(
            self._address,
            cache.kv.data_ptr(),
            cache.cosines.data_ptr(),
            cache.sines.data_ptr(),
            *places[:-1],
            places[-1] if layers else None,
            None if self.hidden is None else self.hidden.data_ptr(),
            logits.data_ptr(),
            scratch.data_ptr(),
            cache.capacity,
            rows,
            len(logits),
            held,
            self.threads,
        )
        check_result(self._library, function(ctypes.byref(described), *map(ctypes.byref, options)), described)

    def _buffer(self, rows: int) -> Tensor:
        return torch.empty(self._library.scratch_floats(ctypes.byref(self._struct), rows))
