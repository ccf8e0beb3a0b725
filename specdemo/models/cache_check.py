"""Check of a `transformers` model: passes with a KV cache must equal passes without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.generic import (
    EncoderDecoderEngine,
    TransformersCache,
    TransformersEngine,
    full_pass,
    has_encoder,
    has_window,
    refuse_recurrent,
)
from specdemo.models.engines.llama_weights import can_pack, pack, unpack
from specdemo.models.memory import is_out_of_memory
from specdemo.models.untrusted import error_reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_START, _SPLIT = 14, 6  # tokens before the branches; tokens of the first part of the prompt
_BRANCHES = (-1, -1, 0, 1)  # parents of two branches of two tokens
_NO_DRAFT = Draft()
_DIFFERENT = "its logits differ from those of full passes"


@dataclass(frozen=True)
class CacheSupport:
    """Reasons why a model cannot use a cache or forests; empty texts mean no limit."""

    uncached: str = ""
    forests: str = ""  # clause that continues the name of the class

    @property
    def note(self) -> str:
        return f"; no KV cache, because {self.uncached}" if self.uncached else ""


_RESULTS: WeakKeyDictionary[PreTrainedModel, CacheSupport] = WeakKeyDictionary()


def cache_support(model: PreTrainedModel) -> CacheSupport:
    """Return the limits of a model, checked once. Raises `UserError` for unusable models."""
    if model not in _RESULTS:
        refuse_recurrent(type(model), model.config)
        _RESULTS[model] = _check(model)
    return _RESULTS[model]


@torch.inference_mode()
def pack_if_exact(model: PreTrainedModel) -> None:
    """Pack linear layers, unless the model reads their weights."""
    if not can_pack(next(model.parameters())):
        return
    before = _Comparison(model)
    pack(model)
    if _problem(lambda: before.equal(_Comparison(model).first, before.first)):
        unpack(model)


@torch.inference_mode()
def _check(model: PreTrainedModel) -> CacheSupport:
    name = type(model).__name__
    try:
        comparison = _Comparison(model)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = error_reason(error)
        raise UserError(f"{name} cannot process text alone ({reason}): choose a text generation model") from None
    if not comparison.equal(comparison.first[:_START], comparison.second[:_START]):
        raise UserError(
            f"{name} changes the logits of earlier tokens when a token is added, so it is not a causal language model: "
            "choose a text generation model"
        )
    if problem := _problem(comparison.has_exact_chains):
        return CacheSupport(uncached=problem, forests="runs without a KV cache")
    if has_window(model):
        return CacheSupport(forests="has a sliding window")
    if has_encoder(model.config) or _problem(comparison.has_exact_forests):
        return CacheSupport(forests="does not follow the mask or the positions of several continuations")
    return CacheSupport()


def _problem(test: Callable[[], bool]) -> str:
    try:
        return "" if test() else _DIFFERENT
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"its passes fail ({error_reason(error)})"


class _Comparison:
    """Full passes over two texts with a common beginning, compared with passes of a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        vocab = model.config.get_text_config(decoder=True).vocab_size
        self._engine = EncoderDecoderEngine(model) if has_encoder(model.config) else TransformersEngine(model)
        self._source = [token % model.config.get_text_config().vocab_size for token in (5, 7, 9, 11, 13, 6)]
        ids = range(3, min(vocab, 90)) if vocab > 8 else range(vocab)  # ids of ordinary tokens
        picks = torch.randint(len(ids), (_START + 5,), generator=torch.Generator().manual_seed(1)).tolist()
        tokens = [ids[i] for i in picks]
        self._text = tokens[:_START]
        self._drafted = tokens[_START:-1]
        self._next = tokens[-1]
        # The tolerance is 5e-3 in float32, 0.1 in float16, 0.2 in bfloat16 (rounding: 0.01, or 0.07 with sharp
        # attention); faults are 0.1 to 5.
        dtype = torch.bfloat16 if hasattr(model, "hf_quantizer") else model.dtype
        self._tolerance = torch.finfo(dtype).eps ** (1 / 3)
        a, b, c, d = self._drafted
        full = full_pass(model, self._source)
        self.first, self.second = (
            full(torch.tensor([[*self._text, *branch]], device=model.device)) for branch in ([a, c], [b, d, self._next])
        )

    def has_exact_chains(self) -> bool:
        """Test a prompt in two parts, a draft, a rollback and another draft."""
        cache, (a, b, c, d) = self._filled_cache(), self._drafted
        last = self._run(cache, self._text[_SPLIT:], _SPLIT)
        first = self._run(cache, [a, c], _START, Draft.chain((c,)))
        cache.keep(_START)
        second = self._run(cache, [b, d, self._next], _START, Draft.chain((d, self._next)))
        expected = (self.first[_START - 1 : _START], self.first[_START:], self.second[_START:])
        return all(map(self.equal, (last, first, second), expected))

    def has_exact_forests(self) -> bool:
        """Test a draft of two branches and the continuation of the second branch."""
        cache = self._filled_cache()
        self._run(cache, self._text[_SPLIT:-1], _SPLIT)
        draft = Draft(tuple(self._drafted), _BRANCHES)
        rows = self._run(cache, [self._text[-1], *draft.tokens], _START - 1, draft)
        cache.keep(_START, [_START + 1, _START + 3])
        after = self._run(cache, [self._next], _START + 2)
        first, second = self.first[_START - 1 :], self.second[_START - 1 :]
        expected = torch.stack([first[0], first[1], second[1], first[2], second[2]])
        return self.equal(rows, expected) and self.equal(after, second[3:])

    def _filled_cache(self) -> TransformersCache:
        cache = self._engine.open(self._source)
        self._run(cache, self._text[:_SPLIT], 0)
        return cache

    def _run(self, cache: TransformersCache, new: list[int], held: int, draft: Draft = _NO_DRAFT) -> Tensor:
        return self._engine.run([Entry(cache, new, held, draft)])[0]

    def equal(self, rows: Tensor, expected: Tensor) -> bool:
        """Compare the root mean squares of the differences in rows with the spread of the logits."""
        if rows.shape != expected.shape:
            return False
        rows, expected = rows.float(), expected.float()
        known = expected.isfinite()
        spread = expected[known].std(correction=0) if known.any() else torch.tensor(0.0)
        difference = torch.where(known, rows - expected, 0).square().mean(-1).sqrt()
        return bool((difference <= self._tolerance * spread).all())
