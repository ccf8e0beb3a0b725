"""Engine for models whose passes with a KV cache are not exact: each pass processes the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdemo.core.step import Draft
from specdemo.models.engines.encoder_decoder import has_encoder

FullPass = Callable[[Tensor], Tensor]  # token ids [1, n] to logits [n, vocab]


def full_pass(model: PreTrainedModel, source: Sequence[int]) -> FullPass:
    """Return a pass without a KV cache; an encoder processes `source` once."""
    inputs: dict[str, Any] = {}

    def run(ids: Tensor) -> Tensor:
        if not has_encoder(model.config):
            return model(input_ids=ids, use_cache=False).logits[0]
        if not inputs:  # FSMT masks later tokens only if `input_ids` is given
            inputs["input_ids"] = torch.tensor([list(source)], device=ids.device)
            inputs["encoder_outputs"] = model.get_encoder()(input_ids=inputs["input_ids"])
        return model(decoder_input_ids=ids, use_cache=False, **inputs).logits[0]

    return run


class UncachedEngine:
    kv_bytes = reserved_bytes = 0

    def __init__(self, model: PreTrainedModel, source: Sequence[int]) -> None:
        self._pass = full_pass(model, source)
        self._tokens = torch.empty(0, dtype=torch.long, device=model.device)

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        """See `CacheEngine.run`; `draft` is a chain."""
        added = torch.as_tensor(new, device=self._tokens.device)
        self._tokens = torch.cat([self._tokens[:held], added])
        return self._pass(self._tokens[None])[held:][-len(draft) - 1 :]

    def keep(self, length: int, slots: list[int]) -> None:
        self._tokens = torch.cat([self._tokens[:length], self._tokens[slots]])
