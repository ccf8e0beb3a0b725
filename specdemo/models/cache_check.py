"""Test of an architecture: passes with a KV cache must equal full passes.

Small random models in float32 separate errors from rounding and keep loading fast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.utils import logging

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.generic import (
    EncoderDecoderEngine,
    FullPass,
    TransformersCache,
    TransformersEngine,
    full_pass,
    has_encoder,
    has_window,
    refuse_recurrent,
)
from specdemo.models.engines.llama_weights import pack
from specdemo.models.memory import is_out_of_memory
from specdemo.models.small_twin import reduced, small_twin

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_TEXT, _PREFIX = 26, 18  # lengths in tokens
_CACHED = 12  # cached tokens
_NO_DRAFT = Draft()
_BRANCHES = Draft((1, 2, 3, 4), (-1, -1, 0, 1))
_OWN_POSITIONS = "computes positions from the number of cached tokens"


@dataclass(frozen=True)
class CacheSupport:
    """Reasons why an architecture cannot use a cache or forests; empty texts mean no limit."""

    refusal: str = ""  # sentence for the user, if the model cannot be used
    uncached: str = ""
    forests: str = ""  # clause that continues the name of the class
    packs: bool = False  # linear layers may be packed

    @property
    def note(self) -> str:
        return f"; no KV cache, because {self.uncached}" if self.uncached else ""


_RESULTS: dict[tuple[type[PreTrainedModel], str], CacheSupport] = {}


def cache_support(model: PreTrainedModel) -> CacheSupport:
    """Return tested limits. Raises `UserError` for unusable models."""
    return _supported(type(model), model.config, model)


def refuse_architecture(kind: type[PreTrainedModel], config: PretrainedConfig) -> None:
    _supported(kind, config, None)


def _supported(kind: type[PreTrainedModel], config: PretrainedConfig, model: PreTrainedModel | None) -> CacheSupport:
    refuse_recurrent(kind, config)
    with quiet():
        small: PretrainedConfig | None = None
        try:
            small = reduced(kind, config)
            described = f"{small.to_json_string()} {config._attn_implementation}"
        except Exception:
            small, described = None, config.to_json_string()
        key = kind, sha256(described.encode()).hexdigest()
        if key not in _RESULTS:
            twin = _usable_twin(kind, small)
            tested = model if twin is None else twin
            if tested is None:
                return CacheSupport()
            result = check_cache(tested)
            _RESULTS[key] = result if twin is None or result.refusal else replace(result, packs=_packs(twin))
    if refusal := _RESULTS[key].refusal:
        raise UserError(refusal)
    return _RESULTS[key]


@contextmanager
def quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _usable_twin(kind: type[PreTrainedModel], small: PretrainedConfig | None) -> PreTrainedModel | None:
    try:
        twin = None if small is None else small_twin(kind, small)
        if twin is not None:
            full_pass(twin, _source(twin))(torch.tensor([[0, 1]]))
    except Exception:  # reduced sizes may contradict each other
        return None
    return twin


@torch.inference_mode()
def _packs(twin: PreTrainedModel) -> bool:
    return not _problem(_Comparison(twin, full_pass(twin, _source(twin))).packed)


@torch.inference_mode()
def check_cache(model: PreTrainedModel) -> CacheSupport:
    name, full = type(model).__name__, full_pass(model, _source(model))
    comparison = _Comparison(model, full)
    try:
        causal = comparison.causal()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return CacheSupport(f"{name} cannot process text alone ({_first_line(error)}): choose a text generation model")
    if not causal:
        return CacheSupport(
            f"{name} changes the logits of earlier tokens when a token is added, so it is not a causal language model: "
            "choose a text generation model"
        )
    if problem := _problem(comparison.chains):
        return CacheSupport(uncached=problem, forests="runs without a KV cache")
    return CacheSupport(forests=_forest_limit(model, comparison))


def _forest_limit(model: PreTrainedModel, comparison: _Comparison) -> str:
    if has_window(model):
        return "has a sliding window"
    if has_encoder(model.config):
        return _OWN_POSITIONS
    if not _problem(comparison.forests):
        return ""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return _OWN_POSITIONS
    return "does not follow the mask or the positions of several continuations"


def _problem(test: Callable[[], bool]) -> str:
    try:
        return "" if test() else "its logits differ from those of full passes"
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"its passes fail ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__).rstrip(".")


def _source(model: PreTrainedModel) -> list[int]:
    return [token % model.config.get_text_config().vocab_size for token in (5, 7, 9, 11, 13, 6)]


class _Comparison:
    def __init__(self, model: PreTrainedModel, full: FullPass) -> None:
        self._model, self._full = model, full
        vocab = model.config.get_text_config(decoder=True).vocab_size
        ids = range(3, min(vocab, 90)) if vocab > 8 else range(vocab)  # ids of ordinary tokens
        generator = torch.Generator().manual_seed(1)
        picks = torch.randint(len(ids), (2 * _TEXT,), generator=generator).tolist()
        tokens = [ids[i] for i in picks]
        self._text, self._others = tokens[:_TEXT], tokens[_TEXT:]
        # The tolerance is 2e-3 in float32 (rounding: up to 5e-4, faults: 0.1 to 5), 0.06 in float16, 0.14 in bfloat16.
        self._tolerance = torch.finfo(model.dtype).eps ** 0.4

    def causal(self) -> bool:
        rows = self._rows(self._text)[:_PREFIX]
        return self._equal(self._rows(self._text[:_PREFIX]), rows)

    def chains(self) -> bool:
        """Test prefill, draft, rollback, another draft and a single token."""
        text, start = self._text, _CACHED
        cache = self._engine.open(_source(self._model))
        rejected = self._others[:2]
        drafted = [*text[: start + 2], *rejected]
        expected, other = self._rows(text), self._rows(drafted)
        compared = [(self._run(cache, text[:start], 0), expected[start - 1 : start])]
        rows = self._run(cache, drafted[start:], start, Draft.chain(tuple(drafted[start + 1 :])))
        compared.append((rows, other[start:]))
        cache.keep(start + 2)
        rows = self._run(cache, text[start + 2 : -1], start + 2, Draft.chain(tuple(text[start + 3 : -1])))
        compared.append((rows, expected[start + 2 : -1]))
        compared.append((self._run(cache, text[-1:], _TEXT - 1), expected[-1:]))
        return all(self._equal(rows, full) for rows, full in compared)

    def forests(self) -> bool:
        """Test a draft of two branches and the continuation of the second branch."""
        text, start = self._text[:_CACHED], _CACHED
        cache = self._engine.open(_source(self._model))
        draft = Draft(tuple(self._others[:4]), _BRANCHES.parents)
        a, b, c, d = draft.tokens
        first, second = self._rows([*text, a, c]), self._rows([*text, b, d, *self._others[4:6]])
        self._run(cache, text[:-1], 0)
        rows = self._run(cache, [text[-1], *draft.tokens], start - 1, draft)
        expected = torch.stack([first[start - 1], first[start], second[start], first[start + 1], second[start + 1]])
        cache.keep(start, [start + 1, start + 3])
        after = self._run(cache, self._others[4:6], start + 2, Draft.chain((self._others[5],)))
        return self._equal(rows, expected) and self._equal(after, second[-2:])

    def packed(self) -> bool:
        expected = self._rows(self._text)
        pack(self._model)
        self._full = full_pass(self._model, _source(self._model))
        return self._equal(self._rows(self._text), expected)

    @property
    def _engine(self) -> TransformersEngine:
        encoder = has_encoder(self._model.config)
        return EncoderDecoderEngine(self._model) if encoder else TransformersEngine(self._model)

    def _run(self, cache: TransformersCache, new: list[int], held: int, draft: Draft = _NO_DRAFT) -> Tensor:
        return self._engine.run([Entry(cache, new, held, draft)])[0]

    def _rows(self, tokens: list[int]) -> Tensor:
        return self._full(torch.tensor([tokens], device=self._model.device))

    def _equal(self, rows: Tensor, expected: Tensor) -> bool:
        if rows.shape != expected.shape:
            return False
        rows, expected = rows.float(), expected.float()
        known = expected.isfinite()
        spread = expected[known].std(correction=0) if known.any() else torch.tensor(0.0)
        return bool(((rows - expected)[known].abs() <= self._tolerance * spread).all())
