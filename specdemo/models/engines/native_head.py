"""Drafting heads on the native CPU engine: single-layer models, with the input of `combine` in `native/rows.c`."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specdemo.core.step import Draft
from specdemo.models.cached_head import MOST_CONTEXT_TOKENS, CachedHead, Head, StateSource
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.native import BLOCK, CHAIN_ROWS, NativeCache, NativeEngine, NativeModel, array_of_addresses
from specdemo.models.engines.native_matrix import NativeMatrix, WritableMatrix
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.torch_head import HeadWeights
from specdemo.models.memory import LargePageBuffer
from specdemo.native.build import required_library
from specdemo.native.interface import FORMATS, LayerStruct, TextStruct, check_model

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler

# Number formats of layer, output rows and `fc`. Output rows of four bits change the distribution more than a layer of
# four bits. States of the target have outliers, which limit the accuracy of a scale per row.
PRECISIONS = {"float32": ("F32", "F32", "F32"), "4-bit": ("Q4_0", "INT8", "Q8_0")}
_NO_DRAFT = Draft()


class NativeHead(Head, NativeModel):
    """EAGLE-3 head as a native model, with the bits of single rows for any number of rows and threads.

    Embeddings and missing output rows are those of `target`.
    """

    kind = "eagle"
    output_matrix: WritableMatrix

    def __init__(self, weights: HeadWeights, target: NativeWeights, precision: str = "4-bit") -> None:
        """`precision`: a key of `PRECISIONS`. Raises `ValueError` for sizes that do not fit together."""
        assert weights.layer is not None
        self.target, self._sizes = target, weights.layer
        self.taps, self.ids = weights.taps, weights.ids
        self.position_limit, self.width = self._sizes.context, self._sizes.width
        self.heads, self.kv_heads = self._sizes.heads, self._sizes.kv_heads
        self.head_dim = self._sizes.head_dim
        self.kv_dtype = torch.float32 if precision == "float32" else torch.float16
        (self._layer_format, of_output, of_states), self._buffer = PRECISIONS[precision], LargePageBuffer()
        self._kept: list[NativeMatrix | Tensor] = []
        tensors = {name.removesuffix(".weight"): tensor for name, tensor in weights.tensors.items()}
        self._layer = self._decoder_layer(tensors)
        self.layers = array_of_addresses([ctypes.addressof(self._layer)])
        self.fields = {
            "fuse": ctypes.addressof(self._matrix(tensors["fc"], of_states).struct()),
            "stream_norm": self._gain(tensors["hidden_norm"]),
            "final_norm": self._gain(tensors["norm"]),
            "inner": self._sizes.inner,
            "rotated": self.head_dim,
            "gated": True,
            "norm_before_residual": weights.config.enabled("norm_before_residual"),
            "epsilon": self._sizes.epsilon,
            "embedding_scale": 1.0,
        }
        self.extends = "lm_head" not in tensors and weights.ids is not None
        rows = tensors["lm_head"] if "lm_head" in tensors else target.output_rows(weights.ids)
        self.output_matrix = self._matrix(rows, of_output)
        if weights.ids is not None and len(weights.ids) != self.outputs:
            raise ValueError(f"the head has {self.outputs:,} output rows for {len(weights.ids):,} tokens")
        self.embedding_matrix = target.embedding_matrix
        if (table := tensors.get("embed_tokens")) is not None:
            embedding = nn.Embedding(len(table), self.width, _weight=table)
            self.embedding_matrix = NativeMatrix([embedding], self._buffer)
            self._kept.append(self.embedding_matrix)
        check_model(required_library(), self.struct(self.kv_dtype))

    def longest_draft(self, length: int) -> int:
        return max(0, self.position_limit - length + 2)

    def open(self, target: StateSource) -> NativeCachedHead:
        return NativeCachedHead(self, target)

    @property
    def weight_bytes(self) -> int:
        return sum(part.nbytes for part in self._kept)

    def rotation(self, count: int) -> tuple[Tensor, Tensor]:
        return self._sizes.rotation(count)

    def _decoder_layer(self, tensors: Mapping[str, Tensor]) -> LayerStruct:
        block, format_name = required_library().block_outputs(), self._layer_format
        sides = [pad(tensors[f"mlp.{name}_proj"], (0, 0, 0, -self._sizes.inner % block)) for name in ("gate", "up")]
        alternating = torch.stack([side.unflatten(0, (-1, block)) for side in sides], 1).flatten(0, 2)
        return LayerStruct(
            qkv=self._matrix(torch.cat([tensors[f"self_attn.{name}_proj"] for name in "qkv"]), format_name).struct(),
            out=self._matrix(tensors["self_attn.o_proj"], format_name).struct(),
            gate_up=self._matrix(alternating, format_name).struct(),
            down=self._matrix(tensors["mlp.down_proj"], format_name).struct(),
            input_norm=self._gain(tensors["input_layernorm"]),
            mlp_norm=self._gain(tensors["post_attention_layernorm"]),
            attention_scale=self.head_dim**-0.5,
            window=self.window,
        )

    def _matrix(self, rows: Tensor, format_name: str) -> WritableMatrix:
        stored = FORMATS[format_name]
        if stored.group and rows.shape[1] % stored.group:
            stored = FORMATS["F32"]
        matrix = WritableMatrix(rows.shape[0], rows.shape[1], stored, self._buffer)
        matrix.write(rows)
        self._kept.append(matrix)
        return matrix

    def _gain(self, gain: Tensor) -> int:
        if gain.shape != (self.width,):
            raise ValueError(f"a norm has the shape {tuple(gain.shape)}, not {self.width}")
        copied = gain.detach().to(torch.float32, copy=True)
        self._kept.append(copied)
        return copied.data_ptr()


class NativeHeadCache(NativeCache):
    """Keys and values of a head, and the states that its rows receive."""

    def __init__(self, head: NativeHead) -> None:
        super().__init__(head)
        self.target_states: Tensor | None = None  # None: the next row is a draft row
        self.own_state = torch.zeros(head.width, dtype=torch.float32)
        self._states_shape = len(head.taps), head.width
        self._row_bytes = len(head.taps) * self.own_state.nbytes
        self._first_states = 0  # address of the states of row 0

    def receive(self, rows: int, states: Tensor, held: int) -> None:
        """Set the target's states of the rows from `held` on. Raises `ValueError` for another number of rows."""
        if not rows or states.shape != (rows, *self._states_shape):
            raise ValueError(f"states {tuple(states.shape)} are not those of {rows} rows")
        self.target_states = states.float().contiguous()
        self._first_states = self.target_states.data_ptr() - held * self._row_bytes

    def describe(self, text: TextStruct) -> None:
        super().describe(text)
        text.own_state = self.own_state.data_ptr()

    def describe_inputs(self, text: TextStruct) -> None:
        text.target_states = None if self.target_states is None else self._first_states + text.held * self._row_bytes

    def clear(self) -> None:
        super().clear()
        self.target_states = None
        self.own_state.zero_()


class NativeCachedHead(CachedHead):
    """Native head of a text, with the output rows of its tokens."""

    cache: NativeHeadCache

    def __init__(self, head: NativeHead, target: StateSource) -> None:
        super().__init__(head, target, NativeHeadCache(head))
        self._model = head
        if head.extends:
            self._model = copy.copy(head)
            self._model.output_matrix = head.output_matrix.extended(MOST_CONTEXT_TOKENS)
        self._engine = NativeEngine(self._model)
        self._end = 0  # rows, including draft rows
        ids = torch.arange(head.outputs) if head.ids is None else head.ids
        self._extended_tokens = pad(ids.to(torch.int32), (0, MOST_CONTEXT_TOKENS))
        self._tokens = self._extended_tokens[: head.outputs]

    def expect(self) -> None:
        self._engine.expect(self.cache)

    def start_rows(self, following: list[int], states: Tensor, held: int) -> Tensor:
        self.cache.receive(len(following), states, held)
        (logits,) = self._engine.run([Entry(self.cache, following, held, _NO_DRAFT)])
        self._end = self.cache.length
        return logits[-1]

    def step(self, token: int) -> Tensor:
        committed, self.cache.target_states = self.cache.length, None
        (logits,) = self._engine.run([Entry(self.cache, [token], self._end, _NO_DRAFT)])
        self.cache.length, self._end = committed, self._end + 1
        return logits[0]

    def sample_chain(self, tokens: Sequence[int], sampler: ChainSampler, limits: Sequence[float]) -> list[int] | None:
        rows = self._begin(tokens)
        if rows is None:
            return None
        following, states, held = rows
        self.cache.receive(len(following), states, held)
        if (many := len(following) - 1) >= CHAIN_ROWS:
            self._engine.fill(self.cache, following[:many], held)
            following, held = following[many:], held + many
        drafted = self._engine.sample_chain(self.cache, following, held, sampler, limits, self._tokens)
        if drafted is None:
            self._cached_tokens = list(tokens[: rows[2] + 1])
            return None
        sampler.ids = self.ids
        self._end = self.cache.length
        self.cache.length = held + len(following)
        self._cached_tokens = list(tokens)
        return drafted

    def draft_rows(self) -> tuple[int, Tensor, Tensor]:
        return self._end, self.cache.own_state.clone(), self._draft_blocks(self._end).clone()

    def restore(self, rows: tuple[int, Tensor, Tensor]) -> None:
        self._end, state, blocks = rows
        self.cache.own_state.copy_(state)
        self._draft_blocks(self._end).copy_(blocks)

    @property
    def reserved_bytes(self) -> int:
        return super().reserved_bytes + (self._model.output_matrix.nbytes if self.head.extends else 0)

    def _draft_blocks(self, end: int) -> Tensor:
        first = self.cache.length
        return self.cache.kv[..., first - first % BLOCK : end + -end % BLOCK, :]

    def _write_outputs(self, first: int, tokens: list[int]) -> None:
        self._tokens = self._extended_tokens[: first + len(tokens)]
        self._tokens.numpy()[first:] = tokens
        matrix = self._model.output_matrix
        matrix.outputs = len(self._tokens)
        matrix.copy_rows(self._model.target.output_matrix, self._tokens, first)
        self._engine.update_outputs()
