"""Drafting heads on the native CPU engine: single-layer models, with the input of `combine` in `native/rows.c`."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specdemo.core.step import Draft
from specdemo.models.engines.context_tokens import MOST_CONTEXT_TOKENS, ContextTokens
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.head import Eagle3Weights, Head, HeadCache
from specdemo.models.engines.native import NativeEngine
from specdemo.models.engines.native_cache import BLOCK, NativeCache
from specdemo.models.engines.native_matrix import FLOAT_FORMATS, Joined, NativeMatrix, WritableMatrix
from specdemo.models.engines.native_pass import CHAIN_ROWS
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.memory import LargePageBuffer
from specdemo.native.build import required_library
from specdemo.native.formats import FORMATS
from specdemo.native.interface import LayerStruct, ModelStruct, TextStruct, check_model

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler

# Number formats of layer, output rows and `fc`. Output rows of four bits change the distribution more than a layer of
# four bits. States of the target have outliers, which limit the accuracy of a scale per row.
FORMS = {
    "float32": ("F32", "F32", "F32"),
    "int8": ("INT8", "INT8", "Q8_0"),
    "nf4": ("CODE4", "INT8", "Q8_0"),
}


_NO_DRAFT = Draft()


class NativeHeadWeights:
    """Weights of a head as a native model; embeddings and missing output rows are those of `target`."""

    def __init__(self, weights: Eagle3Weights, target: NativeWeights, form: str) -> None:
        tensors = {name.removesuffix(".weight"): tensor for name, tensor in weights.tensors.items()}
        (self._layer_format, of_output, of_states), self._buffer = FORMS[form], LargePageBuffer()
        self._kept: list[NativeMatrix | Tensor] = []
        self._sizes, self._replaced = weights.layer, weights.norm_before_residual
        self.layers, self.position_limit = [0], weights.layer.context
        self.kv_heads, self.head_dim = weights.layer.kv_heads, weights.layer.head_dim
        self.kv_dtype = torch.float32 if form == "float32" else torch.float16
        self.width = weights.layer.width
        self._layer = self._decoder_layer({name.removeprefix("midlayer."): x for name, x in tensors.items()})
        self._stream_norm, self._leave = self._gain(tensors["midlayer.hidden_norm"]), self._gain(tensors["norm"])
        self._fuse = self._matrix(tensors["fc"], of_states)
        if (rows := tensors.get("lm_head")) is None:
            rows = target.output_rows(weights.ids)
        self._head = self._matrix(rows, of_output)
        self.shares_rows = "lm_head" not in tensors
        self.embedding_matrix = target.embedding_matrix
        if "embed_tokens" in tensors:
            table = tensors["embed_tokens"]
            self.embedding_matrix = NativeMatrix(
                Joined([nn.Embedding(len(table), self.width, _weight=table)]), self._buffer
            )
            self._kept.append(self.embedding_matrix)

    def for_text(self) -> NativeHeadWeights:
        """Return a copy with its own output matrix."""
        copied = copy.copy(self)
        copied._head = self._head.extended(MOST_CONTEXT_TOKENS)
        return copied

    def extend(self, rows: Tensor, first: int) -> None:
        """Store the output rows from `first` on, the last of the matrix."""
        self._head.outputs = first + len(rows)
        self._head.write(rows, first)

    @property
    def outputs(self) -> int:
        return self._head.outputs

    @property
    def output_bytes(self) -> int:
        return self._head.nbytes

    @property
    def weight_bytes(self) -> int:
        return sum(part.nbytes for part in self._kept)

    def rotation(self, count: int) -> tuple[Tensor, Tensor]:
        return self._sizes.rotation(count)

    def struct(self, cache_dtype: torch.dtype) -> tuple[ModelStruct, Any]:
        matrices = (self.embedding_matrix.struct(), self._fuse.struct())
        embedding, fuse = map(ctypes.addressof, matrices)
        layers = (ctypes.c_void_p * 1)(ctypes.addressof(self._layer))
        return ModelStruct(
            layers=ctypes.addressof(layers),
            embedding=embedding,
            fuse=fuse,
            stream_norm=self._stream_norm,
            leave=self._leave,
            head=self._head.struct(),
            layer_count=1,
            width=self.width,
            inner=self._sizes.inner,
            heads=self._sizes.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            cache_form=FLOAT_FORMATS[cache_dtype].number,
            rotated=self.head_dim,
            gated=True,
            replaced=self._replaced,
            epsilon=self._sizes.epsilon,
            embedding_scale=1.0,
        ), (matrices, layers)

    def _decoder_layer(self, tensors: Mapping[str, Tensor]) -> LayerStruct:
        block, form = required_library().block_outputs(), self._layer_format
        sides = [_whole_blocks(tensors[f"mlp.{name}_proj"], block) for name in ("gate", "up")]
        return LayerStruct(
            qkv=self._matrix(torch.cat([tensors[f"self_attn.{name}_proj"] for name in "qkv"]), form).struct(),
            out=self._matrix(tensors["self_attn.o_proj"], form).struct(),
            gate_up=self._matrix(torch.stack(sides, 1).flatten(0, 2), form).struct(),
            down=self._matrix(tensors["mlp.down_proj"], form).struct(),
            enter=self._gain(tensors["input_layernorm"]),
            between=self._gain(tensors["post_attention_layernorm"]),
            attention_scale=self.head_dim**-0.5,
        )

    def _matrix(self, rows: Tensor, form: str) -> WritableMatrix:
        stored = FORMATS[form]
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


def _whole_blocks(rows: Tensor, block: int) -> Tensor:
    """Return `[blocks, block, inputs]`, padded with zeros."""
    return torch.cat([rows, rows.new_zeros(-len(rows) % block, rows.shape[1])]).unflatten(0, (-1, block))


class NativeHeadCache(NativeCache, HeadCache):
    """Keys and values of a head, the state of the last row, and output rows of the text."""

    def __init__(self, head: NativeHead) -> None:
        super().__init__(head.model)
        self.ids = head.ids
        self.tokens = head.tokens
        self._static_count = len(head.tokens)
        self._context, self.engine = ContextTokens(head.static), head.engine
        self._target: NativeWeights | None = None
        if head.extends:
            self._model, self._target = head.model.for_text(), head.target
            self.engine = NativeEngine(self._model)
            self._extended_tokens = pad(head.tokens, (0, MOST_CONTEXT_TOKENS))
            self._extended_ids = self._extended_tokens.to(torch.int64)
        self.end = 0  # includes draft rows
        self.given: tuple[Tensor, int] | None = None  # states of the target during `start`, and their first row
        self._own_state = torch.zeros(head.model.width, dtype=torch.float32)
        self._own_address = self._own_state.data_ptr()

    @property
    def reserved_bytes(self) -> int:
        return super().reserved_bytes + (self._model.output_bytes if self._target else 0)

    def extend(self, following: Sequence[int], held: int) -> None:
        """Add the tokens that follow position `held` and the target's output rows."""
        if self._target is None:
            return
        before = len(self._context.tokens)
        unchanged = self._context.update(following, held)
        if before == unchanged == len(self._context.tokens):
            return
        added = torch.tensor(self._context.tokens[unchanged:], dtype=torch.int64)
        first = self._static_count + unchanged
        end = first + len(added)
        if unchanged < before:
            self._extended_ids = self._extended_ids.clone()  # earlier drafts refer to it
        self._extended_ids[first:end] = added
        self._extended_tokens[first:end] = added
        self.ids = self._extended_ids[:end]
        self.tokens = self._extended_tokens[:end]
        self._model.extend(self._target.output_rows(added), first)
        self.engine.update_outputs()

    def describe(self, text: TextStruct) -> None:
        super().describe(text)
        text.own_state = self._own_address
        if self.given:
            states, first = self.given
            text.target_states = states.data_ptr() + (text.held - first) * states.stride(0) * states.element_size()
        else:
            text.target_states = None

    def draft_rows(self) -> tuple[Tensor, Tensor, int]:
        return self._draft_blocks(self.end).clone(), self._own_state.clone(), self.end

    def restore(self, rows: tuple[Tensor, Tensor, int]) -> None:
        blocks, state, self.end = rows
        self._draft_blocks(self.end).copy_(blocks)
        self._own_state.copy_(state)

    def _draft_blocks(self, end: int) -> Tensor:
        """Return the blocks of keys and values of the draft rows up to `end`."""
        return self.kv[..., self.length - self.length % BLOCK : end + -end % BLOCK, :]

    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        super().keep(length, slots)
        self.end = length

    def clear(self) -> None:
        super().clear()
        self._own_state.zero_()
        self.extend([], -1)
        self.end = 0


class NativeHead(Head):
    """EAGLE-3 head in C, with the bits of single rows for any number of rows and threads."""

    kind = "eagle"

    def __init__(self, weights: Eagle3Weights, target: NativeWeights, form: str = "nf4") -> None:
        """`form`: a key of `FORMS`. Raises `ValueError` for sizes that contradict each other or those of `target`."""
        self.taps, self.ids = weights.taps, weights.ids
        self._context = weights.layer.context
        self.model, self.target = NativeHeadWeights(weights, target, form), target
        self.weight_bytes = self.model.weight_bytes
        self._states_shape = len(weights.taps), self.model.width
        self.engine = NativeEngine(self.model)
        self.extends = self.model.shares_rows and weights.ids is not None
        self.static = frozenset(() if weights.ids is None else weights.ids.tolist())
        count = self.model.outputs
        self.tokens = (torch.arange(count) if weights.ids is None else weights.ids).to(torch.int32)
        if len(self.tokens) != count:
            raise ValueError(f"the head has {count:,} output rows for {len(self.tokens):,} tokens")
        struct, _references = self.model.struct(self.model.kv_dtype)
        check_model(required_library(), struct)

    def longest_draft(self, length: int) -> int:
        return max(0, self._context - length + 2)

    def open(self) -> NativeHeadCache:
        cache = NativeHeadCache(self)
        cache.threads = torch.get_num_threads()
        return cache

    def expect(self, cache: HeadCache) -> None:
        assert isinstance(cache, NativeHeadCache)
        cache.engine.expect(cache)

    def start(self, cache: HeadCache, following: list[int], states: Tensor, held: int) -> Tensor:
        assert isinstance(cache, NativeHeadCache)
        following, states, held = self._catch_up(cache, following, states, held)
        self._give(cache, states, following, held)
        try:
            (logits,) = cache.engine.run([Entry(cache, following, held, _NO_DRAFT)])
        finally:
            cache.given = None
        cache.keep(held + len(following))
        return logits[-1]

    def step(self, cache: HeadCache, token: int) -> Tensor:
        assert isinstance(cache, NativeHeadCache)
        committed, end = cache.length, cache.end
        (logits,) = cache.engine.run([Entry(cache, [token], end, _NO_DRAFT)])
        cache.length, cache.end = committed, end + 1
        return logits[0]

    def sample_chain(
        self,
        cache: HeadCache,
        following: list[int],
        states: Tensor,
        held: int,
        sampler: ChainSampler,
        count: int,
        threshold: float,
    ) -> list[int] | None:
        assert isinstance(cache, NativeHeadCache)
        following, states, held = self._catch_up(cache, following, states, held)
        self._give(cache, states, following, held)
        try:
            tokens = cache.engine.sample_chain(cache, following, held, count, sampler, cache.tokens, threshold)
        finally:
            cache.given = None
        if tokens is not None:
            sampler.ids = cache.ids
            end = cache.length
            cache.keep(held + len(following))
            cache.end = end
        return tokens

    def _catch_up(
        self, cache: NativeHeadCache, following: list[int], states: Tensor, held: int
    ) -> tuple[list[int], Tensor, int]:
        """Add all but the last of many rows; return the rest."""
        if (many := len(following) - 1) < CHAIN_ROWS:
            return following, states, held
        self._give(cache, states[:many], following[:many], held)
        try:
            cache.engine.fill(cache, following[:many], held)
        finally:
            cache.given = None
        cache.keep(held + many)
        return following[many:], states[many:], held + many

    def _give(self, cache: NativeHeadCache, states: Tensor, following: Sequence[int], held: int) -> None:
        rows = len(following)
        if not rows or states.shape != (rows, *self._states_shape):
            raise ValueError(f"states {tuple(states.shape)} are not those of {rows} rows")
        if not 0 <= held <= cache.length:
            raise ValueError(f"row {held} does not follow the {cache.length} rows of the cache")
        if states.dtype is not torch.float32 or not states.is_contiguous():
            states = states.float().contiguous()
        cache.given = states, held
        cache.extend(following, held)
