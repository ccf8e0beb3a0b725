"""Block heads on the native CPU engine: a pass for all slots, see `block_slots` in `native/interface.h`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdemo.core.step import Draft
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.head import BlockWeights, HeadCache, check_token
from specdemo.models.engines.native_head import NativeHead, NativeHeadCache, NativeHeadWeights
from specdemo.models.engines.native_matrix import Joined, NativeMatrix
from specdemo.models.engines.native_pass import CHAIN_ROWS
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.native.build import required_library
from specdemo.native.interface import BlockSlotsStruct, ModelStruct, TextStruct

if TYPE_CHECKING:
    from specdemo.core.sampling import ChainSampler


class NativeBlockWeights(NativeHeadWeights):
    """Weights of a block head, with the Markov term applied to the output rows."""

    def __init__(self, weights: BlockWeights, target: NativeWeights, form: str) -> None:
        super().__init__(weights, target, form, weights.layers)
        tensors = {name: tensor.float() for name, tensor in weights.tensors.items()}
        to_state, of_state = tensors["markov_head.markov_w2.weight"], tensors["confidence_head.proj.weight"]
        narrow = self._float_matrix(tensors["markov_head.markov_w1.weight"])
        by_token = self._output_rows.float() @ to_state
        wide = self._float_matrix(by_token if form == "float32" else by_token.half())
        weights_and_bias = (of_state[0], of_state[0] @ to_state, tensors["confidence_head.proj.bias"])
        confidence, shifts = torch.cat(weights_and_bias), tensors["slots"].contiguous()
        self._kept += [confidence, shifts]
        self._slots = BlockSlotsStruct(
            narrow=narrow.struct(),
            wide=wide.struct(),
            shifts=shifts.data_ptr(),
            confidence=confidence.data_ptr(),
            count=len(shifts),
        )

    def _float_matrix(self, rows: Tensor) -> NativeMatrix:
        matrix = NativeMatrix(Joined([nn.Embedding(len(rows), rows.shape[1], _weight=rows)]), self._buffer)
        self._kept.append(matrix)
        return matrix

    def struct(self, cache_dtype: torch.dtype) -> tuple[ModelStruct, Any]:
        model, references = super().struct(cache_dtype)
        model.slots = ctypes.addressof(self._slots)
        return model, references


class NativeBlockHeadCache(NativeHeadCache):
    """Keys, values and normalised last states of the rows, and the slots of the last pass."""

    def __init__(self, head: NativeBlockHead) -> None:
        super().__init__(head)
        self.taps = (len(head.model.layers),)
        self.committed = 0  # rows before the slots
        self.logits = torch.empty(0, 0, dtype=torch.float32)  # `[slots, size]`
        self.drafted = 0
        self.confidence = 0.0

    def draft_rows(self) -> int:  # type: ignore[override]
        return self.drafted

    def restore(self, rows: int) -> None:  # type: ignore[override]
        self.drafted = rows

    def describe(self, text: TextStruct) -> None:
        super().describe(text)
        text.slot_rows = max(0, text.held + text.rows - self.committed)

    def clear(self) -> None:
        super().clear()
        self.logits.zero_()

    @property
    def reserved_bytes(self) -> int:
        return super().reserved_bytes + self.logits.nbytes


class NativeBlockHead(NativeHead):
    """Block head in C."""

    kind = "block"

    def __init__(self, weights: BlockWeights, target: NativeWeights, form: str = "int8") -> None:
        super().__init__(weights, target, form)
        self.extends = False  # the Markov term covers the static vocabulary
        self._slots = weights.slots
        self._embedded = torch.empty(self.model.width, dtype=torch.float32)
        self._struct, self._references = self.model.struct(self.model.kv_dtype)

    def _converted(self, weights: BlockWeights, target: NativeWeights, form: str) -> NativeBlockWeights:
        return NativeBlockWeights(weights, target, form)

    def longest_draft(self, length: int) -> int:
        return min(self._slots, super().longest_draft(length))

    def open(self) -> NativeBlockHeadCache:
        cache = NativeBlockHeadCache(self)
        cache.threads = torch.get_num_threads()
        return cache

    def start(self, cache: HeadCache, following: list[int], states: Tensor, held: int) -> Tensor:
        assert isinstance(cache, NativeBlockHeadCache)
        rows = self._give_slots(cache, following, states, held, self.longest_draft(held + len(following) + 1))
        try:
            (cache.logits,) = cache.engine.run([Entry(cache, rows, held, Draft.chain(tuple(rows[len(following) :])))])
        finally:
            cache.given = None
        cache.keep(held + len(following))
        cache.drafted = 0
        return self._follow(cache, following[-1])

    def step(self, cache: HeadCache, token: int) -> Tensor:
        assert isinstance(cache, NativeBlockHeadCache)
        cache.drafted += 1
        return self._follow(cache, token)

    def confidence(self, cache: HeadCache) -> float:
        assert isinstance(cache, NativeBlockHeadCache)
        return cache.confidence

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
        assert isinstance(cache, NativeBlockHeadCache)
        if len(following) + count - 1 > CHAIN_ROWS:
            return None
        rows = self._give_slots(cache, following, states, held, count)
        try:
            tokens = cache.engine.sample_chain(cache, rows, held, count, sampler, cache.tokens, threshold, True)
        finally:
            cache.given = None
        if tokens is not None:
            cache.keep(held + len(following))
            sampler.ids = cache.ids
        return tokens

    def _give_slots(
        self, cache: NativeBlockHeadCache, following: list[int], states: Tensor, held: int, count: int
    ) -> list[int]:
        """Set the states of committed rows and slots; return their tokens."""
        slots = count - 1
        rows = following + following[-1:] * slots
        self._give(cache, torch.cat([states, states[-1:].expand(slots, -1, -1)]), rows, held)
        cache.committed = held + len(following)
        return rows

    def _follow(self, cache: NativeBlockHeadCache, token: int) -> Tensor:
        check_token(token, self.model.embedding_matrix.outputs)
        logits, state = cache.logits[cache.drafted].clone(), cache.states[cache.committed - 1 + cache.drafted]
        cache.confidence = required_library().follow_token(
            ctypes.byref(self._struct), state.data_ptr(), token, self._embedded.data_ptr(), logits.data_ptr()
        )
        return logits
