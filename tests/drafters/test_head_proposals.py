"""Drafts of a head are those of a recomputation for the full text.

Wrong states, positions or cached rows are invisible to exactness and to greedy equality, since rejection sampling is
exact for any q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.heads import head_config, head_tensors, save_head
from fakes.native_models import CONFIGS, random_model
from fakes.reference_head import reference_logits
from fakes.tiny_models import committed, run
from torch import Tensor

from specdemo.core.decode import DraftBudget
from specdemo.core.policies import Fixed, PathProbability
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.heads.eagle import HeadDrafter
from specdemo.models.cached_head import CachedHead
from specdemo.models.engines.head import HeadCache
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.torch_head import TorchHead
from specdemo.models.heads import read_head
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.spec import HeadSpec, ModelSpec

SAMPLING, GAMMA, LENGTH = SamplingParams(temperature=0.8), 3, 14
IDS = [*range(0, 300, 3)]
PROMPTS = ([5, 17, 200, 3, 99], [7, 8, 9])  # turns of a conversation
MODEL = random_model(CONFIGS["tied"])
ENGINES: dict[str, Callable[[], Any]] = {
    "native": lambda: NativeWeights(MODEL),
    "torch": lambda: LlamaWeights(MODEL),
    "transformers": lambda: MODEL,
}


class Recorder(HeadDrafter):
    """Records the texts and drafts."""

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        draft = super().propose(tokens, budget)
        self.__dict__.setdefault("drafts", []).append((list(tokens), draft))
        return draft


class Conversation:
    """A target and a head, whose caches are kept for all turns."""

    def __init__(self, folder: Path, engine: str, kind: type[CachedHead], head: Callable[..., Any]) -> None:
        self.tensors, self.config = head_tensors(CONFIGS["tied"], IDS), head_config(CONFIGS["tied"], len(IDS))
        model, spec = ENGINES[engine](), ModelSpec("small/target")
        name = save_head(folder, self.tensors, self.config)
        loaded = head(read_head(HeadSpec(name, spec), LoadedModel(spec, model, None, 0, engine)), model)
        self.target = CachedModel(model, taps=loaded.taps)
        noise = [Noise(3, name) for name in ("draft", "accept", "correct")]
        self.drafter = Recorder(kind(loaded, self.target), SAMPLING, noise[0], self.target.vocab_size)
        self.verifier = ModelVerifier(self.target.score, SAMPLING, rejection, *noise[1:])
        self.accepted = 0

    def answer(self, text: Sequence[int]) -> list[int]:
        """Continue `text`; return text and continuation."""
        steps = run(text, self.verifier, self.drafter, Fixed(GAMMA), LENGTH)
        self.accepted += sum(len(step.verdict.accepted) for step in steps)
        return [*text, *committed(steps)]

    @property
    def deviation(self) -> float:
        """Return the largest difference of a probability from the recomputation."""
        worst = 0.0
        for tokens, draft in self.drafter.__dict__["drafts"]:
            logits = reference_logits(self.tensors, self.config, MODEL, tokens, draft.tokens[:-1])
            expected = (logits / SAMPLING.temperature).softmax(-1)
            assert draft.probs is not None
            for node, row in enumerate(expected):
                worst = max(worst, float((draft.probs.row(node).values - row).abs().max()))
        return worst


def converse(
    folder: Path, engine: str = "native", kind: type[CachedHead] = CachedHead, head: type[TorchHead] = TorchHead
) -> Conversation:
    """Hold two turns, then edit the first."""
    conversation = Conversation(folder, engine, kind, head)
    first = conversation.answer(PROMPTS[0])
    conversation.answer([*first, *PROMPTS[1]])
    conversation.answer([*first[:-6], *PROMPTS[1]])
    return conversation


@pytest.mark.parametrize("engine", ENGINES)
def test_drafts_equal_a_recomputation_for_the_full_text(engine: str, tmp_path: Path) -> None:
    conversation = converse(tmp_path, engine)
    drafts = conversation.drafter.__dict__["drafts"]
    drafted = sum(len(draft) for _, draft in drafts)
    assert conversation.deviation < 1e-4
    assert len(drafts) > 20 and drafted > conversation.accepted > 0


@pytest.mark.parametrize("temperature", [0, 0.2, 1])
def test_native_chains_end_by_the_probabilities_of_raw_logits(temperature: float, tmp_path: Path) -> None:
    """As `PathProbability` does step by step, whatever the temperature of sampling."""
    conversation = Conversation(tmp_path, "native", CachedHead, partial(NativeHead, form="float32"))
    drafter, threshold, lengths = conversation.drafter, 0.02, set()
    drafter.sampling = SamplingParams(temperature=temperature)
    for seed in range(12):
        text = [(7 * i + seed) % 300 for i in range(4 + seed)]
        conversation.target.score(text[:-1], Draft())
        draft = drafter.propose(text, DraftBudget(6, PathProbability(6, threshold=threshold)))
        rows = reference_logits(conversation.tensors, conversation.config, MODEL, text, draft.tokens)
        reach = rows.softmax(-1).amax(-1).cumprod(0).tolist()
        assert all(value > 0.99 * threshold for value in reach[: len(draft)])
        assert len(draft) == 6 or reach[len(draft)] < 1.01 * threshold
        lengths.add(len(draft))
    assert len(lengths) > 1


# --- mutants ---------------------------------------------------------------------------------------------------------


class RejectedState(CachedHead):
    """The last row gets the state at the position of the rejected token."""

    def _missing(self, tokens: Sequence[int]) -> Any:
        rows = super()._missing(tokens)
        if rows is not None:
            stored = self.target._cache.states[len(tokens) - 1]  # type: ignore[attr-defined]
            rows = rows[0], torch.cat([rows[1][:-1], stored[None]]), rows[2]
        return rows


class ShiftedTokens(CachedHead):
    """Rows get the token of their own position."""

    def _missing(self, tokens: Sequence[int]) -> Any:
        rows = super()._missing(tokens)
        return rows and (list(tokens[rows[2] : -1]), *rows[1:])


class ShiftedStates(CachedHead):
    """Rows get the states of the position before."""

    def _missing(self, tokens: Sequence[int]) -> Any:
        following, states, held = super()._missing(tokens) or ([], None, 0)
        before = self.target.states(tokens[:-1], max(0, held - 1))
        return None if states is None or before is None else (following, before[: len(states)], held)


class DraftRowsStay(CachedHead):
    """Draft rows count as committed."""

    def _missing(self, tokens: Sequence[int]) -> Any:
        end = self._cache.end  # type: ignore[attr-defined]
        if not self._held:
            return super()._missing(tokens)
        held = min(end, len(tokens) - 2)
        states = self.target.states(tokens[:-1], held)
        return None if states is None else (list(tokens[held + 1 :]), states, held)


class LengthAddressed(CachedHead):
    """Rows of an edited text are those of the text before."""

    def _missing(self, tokens: Sequence[int]) -> Any:
        self._held = list(tokens[: len(self._held)])
        return super()._missing(tokens)


class DraftPositionsShifted(TorchHead):
    """The positions of draft rows are one too high."""

    shift = 0

    def step(self, cache: HeadCache, token: int) -> Tensor:
        self.shift = 1
        logits = super().step(cache, token)
        self.shift = 0
        return logits

    def _rotated(self, heads: Tensor, first: int) -> Tensor:
        return super()._rotated(heads, first + self.shift)


class NormalisedState(TorchHead):
    """Draft rows get the state after the norm."""

    def step(self, cache: Any, token: int) -> Tensor:
        cache.state = self._norm("norm", cache.state)
        return super().step(cache, token)


@pytest.mark.parametrize("kind", [RejectedState, ShiftedTokens, ShiftedStates, DraftRowsStay, LengthAddressed])
def test_wrong_rows_are_detected(kind: type[CachedHead], tmp_path: Path) -> None:
    assert converse(tmp_path, kind=kind).deviation > 1e-2


@pytest.mark.parametrize("head", [DraftPositionsShifted, NormalisedState])
def test_wrong_passes_are_detected(head: type[TorchHead], tmp_path: Path) -> None:
    assert converse(tmp_path, head=head).deviation > 1e-2


def test_texts_are_not_cached_longer_than_the_target(tmp_path: Path) -> None:
    conversation = converse(tmp_path)
    cached: Any = conversation.drafter.head
    conversation.target.head = cached
    assert cached.kv_bytes > 0 and conversation.target.kv_bytes > cached.kv_bytes
    conversation.target.close()
    assert cached.kv_bytes == 0 and not cached._cache.kv.any() and not cached._cache.state.any()
    assert torch.is_tensor(cached._cache.kv)
