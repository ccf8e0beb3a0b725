"""Engines for `transformers` models, with a preallocated KV cache or none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as LayerCache
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.engines.engine import Cache, Engine, Entry, FusedWeights, cache_capacity
from specdemo.models.memory import weight_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FullPass = Callable[[Tensor], Tensor]  # maps token ids [1, n] to logits [n, vocab]


def positions(rows: int, held: int, draft: Draft) -> list[int]:
    """Return text positions of `rows` new tokens, which end with the last nodes of `draft`."""
    length = held + rows - len(draft)
    nodes = range(max(0, held - length), len(draft))
    return [*range(held, length), *(length + len(draft.path(node)) - 1 for node in nodes)]


def visible(rows: int, held: int, draft: Draft) -> Tensor:
    """Return the attention mask `[rows, held + rows]`, True where visible: the text and a node's ancestors."""
    length = held + rows - len(draft)
    seen = torch.ones(rows, held + rows, dtype=torch.bool).tril(held)
    for node in range(max(0, held - length), len(draft)):
        row = seen[length - held + node]
        row[length:] = False
        row[[length + ancestor for ancestor in draft.path(node)]] = True
    return seen


class InPlaceCacheLayer(DynamicLayer):
    """KV cache of one layer in a preallocated buffer; a rollback changes only its length.

    Stores all positions even for sliding windows, since a rollback may need them again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[1, heads, n, dim]` states; return views of all states."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers
        end = self.length + key_states.shape[2]
        if end > keys.shape[2]:
            keys, values = (self._grown(states, cache_capacity(end)) for states in (keys, values))
            self.keys, self.values = keys, values
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
        new[:, :, : self.length] = old[:, :, : self.length]
        old.zero_()
        return new

    def keep(self, length: int, slots: Sequence[int]) -> None:
        if not self.buffers:
            return
        end = length + len(slots)
        if slots and list(slots) != list(range(length, end)):
            for states in self.buffers:
                states[:, :, length:end] = states[:, :, torch.tensor(slots, device=states.device)]
        self.length = end

    def get_seq_length(self) -> int:
        return self.length

    def bytes_of(self, length: int) -> int:
        return sum(x[:, :, :length].nbytes for x in self.buffers)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return () if self.keys is None or self.values is None else (self.keys, self.values)


def has_window(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    )


def refuse_recurrent(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise `UserError` if layers store more than keys and values."""
    layers = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    others = sorted({*layers} - {"full_attention", "sliding_attention", "chunked_attention"})
    if kind._is_stateful or others:
        named = f" ({', '.join(others)})" if others else ""
        raise UserError(
            f"{kind.__name__} keeps a state{named} that cannot take back a rejected token: choose a model with "
            "ordinary attention layers only"
        )


class TransformersCache(Cache):
    """KV cache of `transformers`; an encoder-decoder also has the encoder output and cross-attention states.

    Hidden states are stored as keys of an additional layer, with a head per tap.
    """

    def __init__(self, source: Sequence[int]) -> None:
        super().__init__()
        self.source = list(source)
        self._reset()

    @torch.inference_mode()
    def clear(self) -> None:
        for states in self._buffers:
            states.zero_()
        self._reset()

    def _reset(self) -> None:
        self.decoder = LayerCache(layer_class_to_replicate=InPlaceCacheLayer)
        self.crossed = DynamicCache()
        self.both = EncoderDecoderCache(self.decoder, self.crossed)
        self.encoded: Any = None
        self._tapped = InPlaceCacheLayer()
        self.states = torch.empty(0, 0, 0, dtype=torch.float32)

    def store(self, hidden: Sequence[Tensor]) -> None:
        rows = torch.stack([hidden[tap].to(hidden[self.taps[0]].device, torch.float32) for tap in self.taps], 1)
        self._tapped.update(rows, rows[..., :0])
        self.states = self._tapped.buffers[0][0].transpose(0, 1)

    @torch.inference_mode()
    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        for layer in self._layers:
            layer.keep(length, slots)

    def bytes_of(self, length: int) -> int:
        crossed: list[Any] = self.crossed.layers
        states = sum(x.nbytes for layer in crossed for x in (layer.keys, layer.values))
        return states + sum(layer.bytes_of(length) for layer in self._layers)

    @property
    def reserved_bytes(self) -> int:
        return sum(x.nbytes for x in self._buffers)

    @property
    def _buffers(self) -> Iterator[Tensor]:
        crossed: list[Any] = self.crossed.layers
        yield from (x for layer in self._layers for x in layer.buffers)
        yield from (x for layer in crossed for x in (layer.keys, layer.values))
        yield from () if self.encoded is None else (self.encoded[0],)

    @property
    def _layers(self) -> list[InPlaceCacheLayer]:
        return [*self.decoder.layers, self._tapped]


class TransformersEngine(Engine[Any]):
    """Engine for decoders of `transformers`, with the KV cache in place."""

    hidden_states = True

    def __init__(self, model: PreTrainedModel, chains_only: str = "") -> None:
        super().__init__()
        self._model, self.chains_only = model, chains_only
        parameters = inspect.signature(model.forward).parameters
        self._selects_rows = "logits_to_keep" in parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache"  # renamed in 5.24

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self._model)

    def new_cache(self, source: Sequence[int] = ()) -> Cache:
        return TransformersCache(source)

    def _pass(self, entry: Entry[Any]) -> Tensor:
        cache, new, held, draft, _ = entry
        device, dtype = self._model.device, self._model.dtype
        extra: dict[str, Any] = {self._cache_name: cache.decoder}
        extra |= {"logits_to_keep": len(draft) + 1} if self._selects_rows else {}
        extra |= {"output_hidden_states": list(cache.taps)} if cache.taps else {}
        if not draft.is_chain:
            mask = torch.zeros(len(new), held + len(new), dtype=dtype)
            mask.masked_fill_(~visible(len(new), held, draft), torch.finfo(dtype).min)
            position_ids = torch.tensor([positions(len(new), held, draft)], device=device)
            extra |= {"attention_mask": mask[None, None].to(device), "position_ids": position_ids}
        output = self._model(input_ids=torch.as_tensor(new, device=device)[None], use_cache=True, **extra)
        if cache.taps:
            cache.store(output.hidden_states)
        return output.logits[0]


def has_encoder(config: PretrainedConfig) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class of `transformers` for all models of this kind."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if has_encoder(config) else AutoModelForCausalLM


def opening(model: PreTrainedModel | FusedWeights) -> list[int]:
    """Return the decoder start token and the forced first token, if any."""
    settings = model.generation_config
    start = settings.bos_token_id if settings.decoder_start_token_id is None else settings.decoder_start_token_id
    if start is None:
        raise UserError(
            f"{type(model).__name__} does not declare which token its decoder starts from: choose another model"
        )
    return [start] if settings.forced_bos_token_id is None else [start, settings.forced_bos_token_id]


class EncoderDecoderEngine(TransformersEngine):
    """Engine for models such as T5 and BART (2211.17192); drafts are chains.

    Encoder output and cross-attention states are computed once; rollback affects only self-attention. Without a source
    the encoder reads the opening of the decoder.
    """

    hidden_states = False

    def new_cache(self, source: Sequence[int] = ()) -> Cache:
        return TransformersCache(source or opening(self._model))

    def _pass(self, entry: Entry[Any]) -> Tensor:
        cache, device = entry.cache, self._model.device
        if cache.encoded is None:
            cache.encoded = self._model.get_encoder()(input_ids=torch.tensor([cache.source], device=device))
        return self._model(
            encoder_outputs=cache.encoded,
            decoder_input_ids=torch.as_tensor(entry.new, device=device)[None],
            use_cache=True,
            **{self._cache_name: cache.both},
        ).logits[0]


def full_pass(model: PreTrainedModel, source: Sequence[int]) -> FullPass:
    inputs: dict[str, Any] = {}

    def run(ids: Tensor) -> Tensor:
        if not has_encoder(model.config):
            return model(input_ids=ids, use_cache=False).logits[0]
        if not inputs:  # FSMT masks later tokens only if `input_ids` is given
            inputs["input_ids"] = torch.tensor([list(source)], device=ids.device)
            inputs["encoder_outputs"] = model.get_encoder()(input_ids=inputs["input_ids"])
        return model(decoder_input_ids=ids, use_cache=False, **inputs).logits[0]

    return run


class TokenCache(Cache):
    """Tokens of a text without keys and values; `full` computes the logits of all tokens."""

    reserved_bytes = 0

    def __init__(self, full: FullPass, device: torch.device) -> None:
        super().__init__()
        self.full = full
        self.tokens = torch.empty(0, dtype=torch.long, device=device)

    def keep(self, length: int, slots: Sequence[int] = ()) -> None:
        self.tokens = torch.cat([self.tokens[:length], self.tokens[list(slots)]])

    def bytes_of(self, length: int) -> int:
        return 0

    def clear(self) -> None:
        self.tokens = self.tokens.new_empty(0)


class UncachedEngine(TransformersEngine):
    """Engine for models that cannot use a KV cache; drafts are chains."""

    hidden_states = divides_prompts = False

    def new_cache(self, source: Sequence[int] = ()) -> Cache:
        source = source or (opening(self._model) if has_encoder(self._model.config) else ())
        return TokenCache(full_pass(self._model, source), self._model.device)

    def _pass(self, entry: Entry[Any]) -> Tensor:
        cache, held = entry.cache, entry.held
        cache.tokens = torch.cat([cache.tokens[:held], torch.as_tensor(entry.new, device=cache.tokens.device)])
        return cache.full(cache.tokens[None])[held:]
