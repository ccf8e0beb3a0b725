"""Block heads: q and confidence of a recomputation for the full text, exact text by enumeration, and known mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.enumeration import PROMPT, ROUNDING, VOCAB, distance, reference_probs
from fakes.heads import SLOTS, block_config, block_tensors, head_for, save_head
from fakes.native_models import CONFIGS, random_model
from fakes.reference_block import reference_block
from fakes.tiny_models import Explorer, byte_level_tokenizer, committed, run, save_model, up_to
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.core.decode import DraftBudget
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.policies import Fixed, PathProbability
from specdemo.core.rules import RULES, rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.draft_vocabulary import DraftVocabulary
from specdemo.drafters.heads.chain import HeadDrafter
from specdemo.generate import generate
from specdemo.models.cached_head import CachedHead
from specdemo.models.engines.head import Head
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native_block_head import NativeBlockHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.torch_block_head import TorchBlockHead, TorchBlockHeadCache
from specdemo.models.heads import read_head
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import HeadSpec, ModelSpec
from specdemo.recipe import Recipe

IDS = [*range(0, 300, 3)]
CONFIG = CONFIGS["tied"]
PROMPTS = ([5, 17, 200, 3, 99], [7, 8, 9])  # turns of a conversation
MODEL = random_model(CONFIG)
TENSORS, SETTINGS = block_tensors(CONFIG, IDS), block_config(CONFIG, len(IDS))
SAMPLING = SamplingParams(temperature=0.8)
MakeHead = Callable[..., Head]
NATIVE: MakeHead = partial(NativeBlockHead, form="float32")
ENGINES: dict[str, tuple[Callable[[Any], Any], MakeHead]] = {
    "native": (NativeWeights, NATIVE),
    "native target": (NativeWeights, TorchBlockHead),
    "torch": (LlamaWeights, TorchBlockHead),
    "transformers": (lambda model: model, TorchBlockHead),
}


def loaded(folder: Path, weights: Any, make: MakeHead, tensors: Any, settings: Any) -> Head:
    spec = ModelSpec("small/target")
    name = save_head(folder, tensors, settings)
    return make(read_head(HeadSpec(name, spec), LoadedModel(spec, weights, None, 0, "")), weights)


class Recorder(HeadDrafter):
    """Records the texts and drafts."""

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        draft = super().propose(tokens, budget)
        self.__dict__.setdefault("drafts", []).append((list(tokens), draft))
        return draft


class Conversation:
    """A target and a head, whose caches are kept for all turns."""

    def __init__(self, folder: Path, engine: str, kind: type[CachedHead] = CachedHead, head: Any = None) -> None:
        convert, make = ENGINES[engine]
        model = convert(MODEL)
        block = loaded(folder, model, head or make, TENSORS, SETTINGS)
        self.target = CachedModel(model, taps=block.taps)
        self.head, noise = kind(block, self.target), [Noise(3, name) for name in ("draft", "accept", "correct")]
        self.drafter = Recorder(self.head, SAMPLING, noise[0], self.target.vocab_size)
        self.verifier = ModelVerifier(self.target.score, SAMPLING, rejection, *noise[1:])
        self.accepted = 0

    def answer(self, text: Sequence[int]) -> list[int]:
        """Continue `text`; return text and continuation."""
        steps = run(text, self.verifier, self.drafter, Fixed(SLOTS), 14)
        self.accepted += sum(len(step.verdict.accepted) for step in steps)
        return [*text, *committed(steps)]

    def drafts(self) -> Iterator[tuple[Draft, Tensor, Tensor]]:
        """Yield each draft with the q and confidences of a recomputation."""
        for tokens, draft in self.drafter.__dict__["drafts"]:
            logits, confidences = reference_block(TENSORS, SETTINGS, MODEL, tokens, draft.tokens[:-1])
            yield draft, (logits / SAMPLING.temperature).softmax(-1), confidences

    @property
    def deviation(self) -> float:
        """Return the largest difference of a probability or confidence from the recomputation."""
        worst = 0.0
        for draft, expected, confidences in self.drafts():
            assert draft.probs is not None and len(draft) == len(expected)
            rows = torch.stack([torch.as_tensor(draft.probs.row(node).values) for node in range(len(draft))])
            given = torch.tensor([origin.confidence for origin in draft.origin])
            worst = max(worst, float((rows - expected).abs().max()), float((given - confidences).abs().max()) - 5e-4)
        return worst


def converse(folder: Path, engine: str = "native target", **kinds: Any) -> Conversation:
    """Hold two turns, then edit the first."""
    conversation = Conversation(folder, engine, **kinds)
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
    assert len(drafts) > 15 and drafted > conversation.accepted > 0
    assert max(len(draft) for _, draft in drafts) == SLOTS


def test_token_by_token_the_native_head_drafts_the_same(tmp_path: Path) -> None:
    """As with penalties, which exclude drafts in a single call."""
    conversation = Conversation(tmp_path, "native")
    conversation.drafter.sampling = SamplingParams(temperature=0.8, bad_words=((299,),))
    conversation.answer([*PROMPTS[0], *range(40)])
    assert conversation.deviation < 1e-4


def test_heads_of_8_bits_draft_with_nearly_the_same_q(tmp_path: Path) -> None:
    rows = []
    for make in (NATIVE, NativeBlockHead):
        conversation = Conversation(tmp_path, "native", head=make)
        conversation.target.score(PROMPTS[0][:-1], Draft())
        logits = [conversation.head.start(PROMPTS[0]), *(conversation.head.step(token) for token in (6, 9, 33))]
        rows.append(torch.stack(logits).softmax(-1))
    assert 0 < (rows[0] - rows[1]).abs().sum(-1).max() < 0.1


@pytest.mark.parametrize("temperature", [0, 0.2, 1])
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_confidences_end_chains_before_tokens_are_chosen(engine: str, temperature: float, tmp_path: Path) -> None:
    conversation = Conversation(tmp_path, engine)
    drafter, threshold, lengths = conversation.drafter, 0.05, set()
    drafter.sampling = SamplingParams(temperature=temperature)
    for seed in range(12):
        text = [(7 * i + seed) % 300 for i in range(4 + seed)]
        conversation.target.score(text[:-1], Draft())
        draft = drafter.propose(text, DraftBudget(SLOTS, PathProbability(SLOTS, threshold=threshold)))
        _, confidences = reference_block(TENSORS, SETTINGS, MODEL, text, draft.tokens[: SLOTS - 1])
        reach = confidences.cumprod(0).tolist()
        assert all(value > 0.99 * threshold for value in reach[: len(draft)])
        assert len(draft) == SLOTS or reach[len(draft)] < 1.01 * threshold
        lengths.add(len(draft))
    assert len(lengths) > 1


@pytest.mark.parametrize("make", [NATIVE, TorchBlockHead])
def test_drafts_end_with_slots_and_context(make: MakeHead, tmp_path: Path) -> None:
    weights = NativeWeights(MODEL)
    block = loaded(tmp_path, weights, make, TENSORS, {**SETTINGS, "max_position_embeddings": 12})
    target = CachedModel(weights, taps=block.taps)
    drafter = HeadDrafter(CachedHead(block, target), SAMPLING, Noise(0, "draft"), target.vocab_size)
    for length in range(4, 17):
        text = [(11 * i) % 300 for i in range(length)]
        target.score(text[:-1], Draft())
        assert len(drafter.propose(text, up_to(9))) == max(0, min(SLOTS, 12 - length + 2))


# --- mistakes in proposals, which no text reveals --------------------------------------------------------------------


class RowsStay(CachedHead):
    """Rows of slots count as committed."""

    def _missing(self, tokens: Sequence[int]) -> Any:
        rows = super()._missing(tokens)
        if rows is None or not self._held:
            return rows
        held = min(self._cache.length + 1, len(tokens) - 2)  # type: ignore[attr-defined]
        states = self.target.states(tokens[:-1], held)
        return None if states is None else (list(tokens[held + 1 :]), states, held)


class LengthAddressed(CachedHead):
    """Rows of an edited text are those of the text before."""

    def _missing(self, tokens: Sequence[int]) -> Any:
        self._held = list(tokens[: len(self._held)])
        return super()._missing(tokens)


class ShiftedTokens(CachedHead):
    """Rows get the token of their own position."""

    def _missing(self, tokens: Sequence[int]) -> Any:
        rows = super()._missing(tokens)
        return rows and (list(tokens[rows[2] : -1]), *rows[1:])


class LateMarkov(TorchBlockHead):
    """The Markov term of each slot gets the last token of the text."""

    def step(self, cache: Any, token: int) -> Tensor:
        return super().step(cache, getattr(self, "last", token))

    def start(self, cache: Any, following: list[int], states: Tensor, held: int) -> Tensor:
        self.last = following[-1]
        return super().start(cache, following, states, held)


class SharedPosition(TorchBlockHead):
    """All slots have the position of the first."""

    def _rotated(self, heads: Tensor, first: int) -> Tensor:
        turned = super()._rotated(heads, first)
        return torch.cat([turned[:, : 1 - SLOTS], super()._rotated(heads[:, 1 - SLOTS :], first)], 1)


class SecondSlotTwice(TorchBlockHead):
    """All slots get the same vector."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tensors["slots"] = self._tensors["slots"][:1].expand(SLOTS - 1, -1)


@pytest.mark.parametrize("kind", [RowsStay, LengthAddressed, ShiftedTokens])
def test_wrong_rows_are_detected(kind: type[CachedHead], tmp_path: Path) -> None:
    assert converse(tmp_path, kind=kind).deviation > 1e-2


@pytest.mark.parametrize("head", [LateMarkov, SharedPosition, SecondSlotTwice])
def test_wrong_passes_are_detected(head: type[TorchBlockHead], tmp_path: Path) -> None:
    assert converse(tmp_path, head=head).deviation > 1e-2


# --- exactness -------------------------------------------------------------------------------------------------------

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5)
EXACT = {
    "plain": SamplingParams(),
    "processed": SamplingParams(top_k=3, repetition_penalty=1.5),
    "top-p": SamplingParams(temperature=0.8, top_p=0.8),
    "greedy": SamplingParams(temperature=0),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[CachedModel, CachedHead]:
    """A random target of four tokens, and a random block head that drafts three of them."""
    torch.manual_seed(4)
    weights = NativeWeights(LlamaForCausalLM(SMALL).eval())
    tensors, settings = block_tensors(SMALL, [0, 1, 3]), block_config(SMALL, 3)
    head = loaded(tmp_path_factory.mktemp("head"), weights, TorchBlockHead, tensors, settings)
    target = CachedModel(weights, taps=head.taps)
    return target, CachedHead(head, target)


def truth(target: CachedModel, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Distribution of three tokens of autoregressive sampling, by multiplication."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, weight in texts.items():
            logits = target.score([*PROMPT, *text], Draft())[0].tolist()
            for token, chance in enumerate(reference_probs(logits, sampling, (*PROMPT, *text))):
                longer[(*text, token)] = weight * chance
        texts = longer
    return texts


def error(
    small: tuple[CachedModel, CachedHead], sampling: SamplingParams, rule: str, policy: Any, kind: Any = HeadDrafter
) -> float:
    """Return the distance of the text's distribution from the target's."""
    (target, head), explorer, counts = small, Explorer(), [0, 0]

    def once() -> tuple[int, ...]:
        verifier = ModelVerifier(target.score, sampling, RULES[rule].apply, explorer, explorer)
        steps = run(PROMPT, verifier, kind(head, sampling, explorer, VOCAB), policy(), 3)
        counts[0] += sum(len(step.draft) for step in steps)
        counts[1] += sum(len(step.draft) < 2 for step in steps[1:-1])
        return tuple(committed(steps))

    result = distance(explorer.distribution(once), truth(target, sampling))
    assert counts[0] > 0 and (policy is Fixed or counts[1] > 0)
    return result


def by_confidence() -> PathProbability:
    return PathProbability(2, threshold=0.3)


@pytest.mark.parametrize("policy", [partial(Fixed, 2), by_confidence])
@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
@pytest.mark.parametrize("name", EXACT)
def test_text_has_the_distribution_of_the_target(
    name: str, rule: str, policy: Any, small: tuple[CachedModel, CachedHead]
) -> None:
    assert error(small, EXACT[name], rule, policy) < 10 * ROUNDING


class ConfidenceInItsOwnToken(HeadDrafter):
    """A draft ends by a confidence that depends on the token that it decides about."""

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        draft = super().propose(tokens, up_to(2))
        if draft.tokens:
            self.head.start(tokens)
            self.head.step(draft.tokens[0])
            assert self.head.confidence is not None
            if self.head.confidence < 0.3:
                return Draft()
        return draft


class ReportedBeforeTopP(HeadDrafter):
    """Tokens are sampled after top-p, and q is reported before it."""

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        draft = super().propose(tokens, budget)
        if draft.probs is None:
            return draft
        raw, logits = replace(self.sampling, top_p=1.0), self.head.start(tokens)
        vocabulary, rows = DraftVocabulary(self.head.ids, VOCAB), []
        for i in range(len(draft)):
            logits = self.head.step(draft.tokens[i - 1]) if i else logits
            assert logits is not None
            rows.append(raw.logits_to_probs(logits[None])[0])
        q = tuple(float(row[vocabulary.index(token)]) for row, token in zip(rows, draft.tokens, strict=True))
        return replace(draft, token_probs=q, probs=vocabulary.rows(rows))


def test_a_confidence_that_depends_on_its_token_is_not_exact(small: tuple[CachedModel, CachedHead]) -> None:
    assert error(small, EXACT["plain"], "rejection", partial(Fixed, 2), ConfidenceInItsOwnToken) > 100 * ROUNDING


def test_a_q_before_top_p_is_not_exact(small: tuple[CachedModel, CachedHead]) -> None:
    sampling = SamplingParams(temperature=4.0, top_p=0.7)  # several tokens remain
    assert error(small, sampling, "rejection", partial(Fixed, 2)) < 10 * ROUNDING
    assert error(small, sampling, "rejection", partial(Fixed, 2), ReportedBeforeTopP) > 100 * ROUNDING


# --- recipes and checkpoints -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("saved")
    target = str(save_model(folder / "target", byte_level_tokenizer(), num_hidden_layers=4))
    head = head_for(target, folder / "head", "block")
    return {"target": target, "head": head}


@pytest.mark.parametrize("method", ["block", "hybrid"])
def test_greedy_turns_have_the_text_of_the_target_alone(method: str, saved: dict[str, str]) -> None:
    pool, texts = ModelPool(), {}
    for name in (method, "ar"):
        options = {} if name == "ar" else {"head": saved["head"], "policy": "path"}
        recipe = Recipe(method=name, target=saved["target"], max_tokens=12, temperature=0.0, device="cpu", **options)
        stores: dict[Any, Any] = {}
        for prompt in ("class Point:\n    def", "class Point:\n    def f():"):
            steps = [event.step for event in generate(recipe, prompt, pool, stores) if isinstance(event, StepEvent)]
            texts[name, prompt] = committed(steps)
            drafted = [origin for step in steps for origin in step.draft.origin]
            assert bool(drafted) == (name != "ar")
            assert all(origin.confidence is not None for origin in drafted if origin.source == "head")
    assert all(text == texts["ar", prompt] for (_, prompt), text in texts.items())


def _changed(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda tensors, settings: tensors.pop(name) and None if tensor is None else tensors.update({name: tensor})


def _configured(**values: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda tensors, settings: settings.update(values)


INVALID = {
    "no layer": (_configured(num_hidden_layers=3), "no tensor layers.2.input_layernorm.weight"),
    "more layers": (_configured(num_hidden_layers=1), r"tensor unknown to block \(layers.1."),
    "slots": (_configured(block_size=9), r"slots of .* has shape 3 x 128 instead of 8 x 128"),
    "no slots": (_configured(block_size=0), "has no block_size"),
    "rank": (_configured(markov_rank=999), "markov_rank in config.json of .* is not within 1 to 256"),
    "text": (_configured(block_size="4"), "has no block_size"),
    "markov": (_changed("markov_head.markov_w2.weight", torch.ones(64, 5)), "has shape 64 x 5 instead of 64 x 6"),
    "confidence": (_changed("confidence_head.proj.bias", None), "no tensor confidence_head.proj.bias"),
    "integers": (_changed("slots", torch.ones(3, 128, dtype=torch.int64)), "has type I64 instead of F32"),
    "layers": (_configured(eagle_aux_hidden_state_layer_ids=[2, 15, 27]), "states of layers that the target does not"),
    "vocabulary": (_changed("d2t", torch.full((len(IDS),), 299)), "d2t of .* leaves the 301 tokens"),
}


@pytest.mark.parametrize("case", INVALID)
def test_checkpoints_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    change, message = INVALID[case]
    tensors, settings = dict(TENSORS), dict(SETTINGS)
    change(tensors, settings)
    with pytest.raises(UserError, match=message):
        loaded(tmp_path, NativeWeights(MODEL), NATIVE, tensors, settings)


@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("wrong", [-1, CONFIG.vocab_size, 1 << 40])
def test_tokens_outside_the_vocabulary_are_refused(wrong: int, engine: str, tmp_path: Path) -> None:
    conversation = Conversation(tmp_path, engine)
    conversation.target.score(PROMPTS[0][:-1], Draft())
    conversation.head.start(PROMPTS[0])
    with pytest.raises((ValueError, IndexError), match=r"outside the vocabulary of 301 tokens|out of range"):
        conversation.head.step(wrong)


def test_closed_texts_do_not_stay_in_the_head(tmp_path: Path) -> None:
    for engine in ("native", "torch"):
        conversation = Conversation(tmp_path, engine)
        conversation.answer(PROMPTS[0])
        cache: Any = conversation.head._cache
        assert conversation.head.kv_bytes > 0 and cache.kv.any() and cache.states.any()
        conversation.target.head = conversation.head
        conversation.target.close()
        assert conversation.head.kv_bytes == 0 and not cache.kv.any() and not cache.states.any()
    assert isinstance(cache, TorchBlockHeadCache)
