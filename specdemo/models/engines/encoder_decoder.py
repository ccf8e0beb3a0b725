"""An encoder-decoder of `transformers` as an engine: its encoder reads the prompt once, its decoder is what goes on.

T5, BART and their like, the setting of the experiments in 2211.17192. The decoder's own keys and values are rolled back
as any model's; those of what the encoder read are the same for every token, so they are made once and kept.
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
    """Whether a model of this kind reads its prompt apart from what it writes."""
    return bool(getattr(config, "is_encoder_decoder", False))


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForSeq2SeqLM]:
    """What loads a model of this kind."""
    return AutoModelForSeq2SeqLM if has_encoder(config) else AutoModelForCausalLM


def opening(model: PreTrainedModel) -> list[int]:
    """The decoder's tokens before anything that it writes: where it starts, and a first token if one is forced on it.

    Raises `UserError` for a model that does not say where it starts.
    """
    settings = model.generation_config
    start = settings.bos_token_id if settings.decoder_start_token_id is None else settings.decoder_start_token_id
    if start is None:
        raise UserError(
            f"{type(model).__name__} does not say which token its decoder starts from: choose another model"
        )
    return [start] if settings.forced_bos_token_id is None else [start, settings.forced_bos_token_id]


class EncoderDecoderEngine:
    """The decoder's forward pass behind what the encoder made of `source`, which it reads with the first pass."""

    def __init__(self, model: PreTrainedModel, source: Sequence[int]) -> None:
        refuse_recurrent(type(model), model.config)
        self._model, self._source = model, list(source)
        self._read: Any = None  # what the encoder made of the source
        self._own = Cache(layer_class_to_replicate=InPlaceCacheLayer)
        self._crossed = DynamicCache()
        self._cache = EncoderDecoderCache(self._own, self._crossed)

    def run(self, new: list[int] | Tensor, held: int, draft: Draft) -> Tensor:
        """Feed `new` after the `held` positions; logits `[len(draft) + 1, vocab]` of the last rows.

        Raises `UserError` for forests: where a token stands is counted by these decoders themselves.
        """
        if not draft.is_chain:
            raise UserError(
                f"{type(self._model).__name__} can be shown chains only: choose a method that drafts a chain"
            )
        device = self._model.device
        if self._read is None:
            self._read = self._model.get_encoder()(input_ids=torch.tensor([self._source], device=device))
        logits = self._model(
            encoder_outputs=self._read,
            decoder_input_ids=torch.as_tensor(new, device=device)[None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[0]
        return logits[-len(draft) - 1 :]

    def keep(self, length: int, slots: list[int]) -> None:
        """Keep the first `length` positions and then those in `slots`, in that order."""
        for layer in self._own.layers:
            layer.keep(length, slots)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers that the decoder's own are held in."""
        return sum(x.numel() * x.element_size() for layer in self._own.layers for x in layer.buffers)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now, those of the source among them."""
        crossed = (x for layer in self._crossed.layers for x in (layer.keys, layer.values))
        return sum(layer.nbytes for layer in self._own.layers) + sum(x.numel() * x.element_size() for x in crossed)
