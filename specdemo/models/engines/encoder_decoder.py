"""Engine for encoder-decoders of `transformers` such as T5 and BART (the models of 2211.17192).

The encoder output and the cross-attention states are computed once; rollback affects only self-attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    PretrainedConfig,
    PreTrainedModel,
)

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.engines.generic import InPlaceCacheLayer, refuse_recurrent


def has_encoder(config: PretrainedConfig) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForSeq2SeqLM]:
    return AutoModelForSeq2SeqLM if has_encoder(config) else AutoModelForCausalLM


def opening(model: PreTrainedModel) -> list[int]:
    """Return the decoder start token and the forced first token, if any."""
    settings = model.generation_config
    start = settings.bos_token_id if settings.decoder_start_token_id is None else settings.decoder_start_token_id
    if start is None:
        raise UserError(
            f"{type(model).__name__} does not declare which token its decoder starts from: choose another model"
        )
    return [start] if settings.forced_bos_token_id is None else [start, settings.forced_bos_token_id]


class EncoderDecoderEngine:
    def __init__(self, model: PreTrainedModel, source: Sequence[int]) -> None:
        refuse_recurrent(type(model), model.config)
        self._model, self._source = model, list(source)
        self._encoded: Any = None
        self._self_attention = Cache(layer_class_to_replicate=InPlaceCacheLayer)
        self._cross_attention = DynamicCache()
        self._cache = EncoderDecoderCache(self._self_attention, self._cross_attention)

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        """See `CacheEngine.run`; `draft` is a chain, because these decoders compute positions internally."""
        device = self._model.device
        if self._encoded is None:
            self._encoded = self._model.get_encoder()(input_ids=torch.tensor([self._source], device=device))
        logits = self._model(
            encoder_outputs=self._encoded,
            decoder_input_ids=torch.as_tensor(new, device=device)[None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[0]
        return logits[-len(draft) - 1 :]

    def keep(self, length: int, slots: list[int]) -> None:
        for layer in self._self_attention.layers:
            layer.keep(length, slots)

    @property
    def reserved_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for layer in self._self_attention.layers for x in layer.buffers)

    @property
    def kv_bytes(self) -> int:
        cross = (x for layer in self._cross_attention.layers for x in (layer.keys, layer.values))
        return sum(layer.nbytes for layer in self._self_attention.layers) + sum(
            x.numel() * x.element_size() for x in cross
        )
