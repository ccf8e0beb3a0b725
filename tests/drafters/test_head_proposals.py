"""Drafts of a head are those of a recomputation for the full text.

Wrong states, positions or cached rows are invisible to exactness and to greedy equality, since rejection sampling is
exact for any q.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.heads import branch_logits, checkpoint, medusa_config, medusa_tensors, reference_logits, save_head
from fakes.native_models import CONFIGS, random_model
from fakes.tiny_models import committed, run
from torch import Tensor

from specdemo.core.decode import DraftBudget
from specdemo.core.distributions import SparseProbs
from specdemo.core.policies import Fixed, PathProbability
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Step
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ChainDrafter
from specdemo.drafters.tree import TreeDrafter
from specdemo.models.cached_head import CachedHead, ContextTokens
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native_head import NativeHead
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.torch_head import TorchCachedHead
from specdemo.models.head_kinds import TorchEagle3
from specdemo.models.heads import load_head
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.spec import HeadSpec, ModelSpec

SAMPLING, GAMMA, LENGTH = SamplingParams(temperature=0.8), 3, 14
pytestmark = pytest.mark.slow

IDS = [*range(0, 300, 3)]
PROMPTS = ([5, 17, 200, 3, 99], [7, 8, 9])  # turns of a conversation
MODEL = random_model(CONFIGS["tied"])
ENGINES: dict[str, Callable[[], Any]] = {
    "native": lambda: NativeWeights(MODEL),
    "torch": lambda: LlamaWeights(MODEL),
    "transformers": lambda: MODEL,
}


TARGET = CONFIGS["tied"]
KINDS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "eagle3": checkpoint("eagle3", TARGET, IDS),
    "eagle": checkpoint("eagle", TARGET),
    "medusa": checkpoint("medusa", TARGET, IDS),
    "medusa, own outputs": (medusa_tensors(TARGET, own=True, blocks=2), medusa_config()),
}


class Recorder:
    """Records the texts and drafts."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.drafts: list[tuple[list[int], Draft]] = []

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        draft = self.drafter.propose(tokens, budget)
        self.drafts.append((list(tokens), draft))
        return draft

    def observe(self, step: Step) -> None:
        return


def chain(head: CachedHead, noise: Noise) -> ChainDrafter:
    return ChainDrafter(head, SAMPLING, noise, TARGET.vocab_size)


def tree(head: CachedHead, noise: Noise) -> TreeDrafter:
    return TreeDrafter(head, SAMPLING, noise, TARGET.vocab_size, nodes=9, width=3, beam=2)


class Conversation:
    """A target and a head, whose caches are kept for all turns."""

    def __init__(
        self,
        folder: Path,
        engine: str,
        kind: str = "eagle3",
        head: Callable[..., Any] | None = None,
        make: Callable[[CachedHead, Noise], Any] = chain,
    ) -> None:
        self.tensors, self.config = KINDS[kind]
        model, spec = ENGINES[engine](), ModelSpec("small/target")
        name = save_head(folder, self.tensors, self.config)
        loaded = load_head(HeadSpec(name, spec), LoadedModel(spec, model, None, 0, engine), make=head)
        self.target = CachedModel(model, taps=loaded.taps)
        noise = [Noise(3, name) for name in ("draft", "accept", "correct")]
        self.head = loaded.open(self.target)
        self.drafter = Recorder(make(self.head, noise[0]))
        self.verifier = ModelVerifier(self.target.score, SAMPLING, rejection, *noise[1:])
        self.accepted = 0

    def answer(self, text: Sequence[int]) -> list[int]:
        """Continue `text`; return text and continuation."""
        steps = run(text, self.verifier, self.drafter, Fixed(GAMMA), LENGTH)
        self.accepted += sum(len(step.verdict.accepted) for step in steps)
        return [*text, *committed(steps)]

    def deviates_by(self, difference: float) -> bool:
        """Return whether a probability of a draft differs by more from the recomputation."""
        for tokens, draft in self.drafter.drafts:
            rows = self.recomputed(tokens, draft)
            assert draft.probs is not None and draft.token_probs is not None
            dense = draft.probs.dense()
            assert dense is not None
            for node, row in enumerate(rows):
                token_difference = abs(draft.token_probs[node] - float(row[draft.tokens[node]]))
                if max(token_difference, float((dense[node] - row).abs().max())) > difference:
                    return True
        return False

    def recomputed(self, tokens: Sequence[int], draft: Draft) -> list[Tensor]:
        """Return the distribution of each node, given that it differs from its earlier siblings."""
        after: dict[int, Tensor] = {}
        leaves = {*range(-1, len(draft))} - {*draft.parents}
        paths = [draft.path(leaf)[:-1] for leaf in leaves]
        branches = [[draft.tokens[node] for node in path] for path in paths]
        logits = branch_logits(self.tensors, self.config, MODEL, tokens, branches)
        for path, rows in zip(paths, logits, strict=True):
            after |= zip([-1, *path], (rows / SAMPLING.temperature).softmax(-1), strict=True)
        distributions = []
        for node, parent in enumerate(draft.parents):
            row = after[parent].clone()
            for sibling in range(node):
                if draft.parents[sibling] == parent:
                    row[draft.tokens[sibling]] = 0
            distributions.append(row / row.sum())
        return distributions


def converse(folder: Path, engine: str = "native", **parts: Any) -> Conversation:
    """Hold two turns, then edit the first."""
    conversation = Conversation(folder, engine, **{"head": TorchEagle3, **parts})
    first = conversation.answer(PROMPTS[0])
    conversation.answer([*first, *PROMPTS[1]])
    conversation.answer([*first[:-6], *PROMPTS[1]])
    return conversation


@pytest.mark.parametrize(
    ("engine", "kind", "make"),
    [
        ("native", "eagle3", chain),
        ("transformers", "eagle3", chain),
        *(("torch", kind, make) for kind in KINDS for make in (chain, tree)),
    ],
)
def test_drafts_equal_a_recomputation_for_the_full_text(
    engine: str, kind: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    """All engines give a head equal states, see `test_hidden_states.py`."""
    head = TorchEagle3 if kind == "eagle3" else None
    conversation = converse(tmp_path, engine, kind=kind, head=head, make=make)
    drafts = conversation.drafter.drafts
    drafted = sum(len(draft) for _, draft in drafts)
    assert not conversation.deviates_by(3e-4)
    assert len(drafts) > 15 and drafted > conversation.accepted > 0
    assert all(draft.is_chain for _, draft in drafts if make is chain)


@pytest.mark.parametrize("make", [chain, tree])
def test_native_drafts_equal_a_recomputation(make: Callable[..., Any], tmp_path: Path) -> None:
    """Branches copy whole blocks of stored keys, and texts have several blocks."""
    conversation = converse(tmp_path, head=partial(NativeHead, precision="float32"), make=make)
    assert not conversation.deviates_by(3e-4)
    drafts = conversation.drafter.drafts
    sizes = {len(draft.probs.ids) for _, draft in drafts if isinstance(draft.probs, SparseProbs)}
    assert len(sizes) > 5 and min(sizes) > len(IDS)  # tokens of the text extend the draft vocabulary


@pytest.mark.parametrize("head", [TorchEagle3, partial(NativeHead, precision="float32")])
def test_tokens_of_an_edited_text_leave_the_draft_vocabulary(
    head: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = ContextTokens.update
    monkeypatch.setattr(ContextTokens, "update", lambda self, following, held: update(self, following, 10**9))
    assert converse(tmp_path, head=head).deviates_by(1e-3)


def test_context_tokens_are_those_of_the_text() -> None:
    random.seed(1)
    context, text = ContextTokens({0, 1, 2}), []
    for _ in range(200):
        held = random.randrange(len(text)) if len(text) > 2 else 0
        text = [*text[: held + 1], *(random.randrange(12) for _ in range(random.randrange(1, 9)))]
        before = [*context.tokens]
        unchanged = context.update(text[held + 1 :], held)
        assert context.tokens == [token for token in dict.fromkeys(text[1:]) if token > 2]
        assert context.tokens[:unchanged] == before[:unchanged]


@pytest.mark.parametrize("temperature", [0, 0.2, 1])
def test_native_chains_end_by_the_probabilities_of_raw_logits(temperature: float, tmp_path: Path) -> None:
    """As `PathProbability` does step by step, whatever the temperature of sampling."""
    conversation = Conversation(tmp_path, "native", head=partial(NativeHead, precision="float32"))
    drafter, limits, lengths = conversation.drafter.drafter, [0.02, 0.02, 0.001, 0.001, 0.0005, 0.0005], set()
    drafter.sampling = SamplingParams(temperature=temperature)
    for seed in range(12):
        text = [(7 * i + seed) % 300 for i in range(4 + seed)]
        conversation.target.score(text[:-1], Draft())
        draft = drafter.propose(text, DraftBudget(6, PathProbability(6, costs=limits)))
        rows = reference_logits(conversation.tensors, conversation.config, MODEL, text, draft.tokens)
        reach = rows.softmax(-1).amax(-1).cumprod(0).tolist()
        count = len(draft)
        before = [1.0, *reach]
        assert all(reach[i] > 0.99 * limits[i] for i in range(count))
        assert all(before[i] ** 2 > 0.99 * limits[i] for i in range(count))
        assert count == 6 or min(reach[count], before[count] ** 2) < 1.01 * limits[count]
        lengths.add(len(draft))
    assert len(lengths) > 1


# --- mutants ---------------------------------------------------------------------------------------------------------


def shifted_states(self: CachedHead, tokens: Sequence[int]) -> Any:
    """Rows get the states of the position before."""
    following, states, held = MISSING(self, tokens) or ([], None, 0)
    before = self.target.states(tokens[:-1], max(0, held - 1))
    return None if states is None or before is None else (following, before[: len(states)], held)


def draft_rows_stay(self: TorchCachedHead, tokens: Sequence[int]) -> Any:
    """Draft rows count as committed."""
    if not self._cached_tokens:
        return MISSING(self, tokens)
    held = min(self.end, len(tokens) - 2)
    states = self.target.states(tokens[:-1], held)
    return None if states is None else (list(tokens[held + 1 :]), states, held)


MISSING = CachedHead._missing
MUTANTS: dict[str, tuple[str, Any]] = {
    "shifted states": ("_missing", shifted_states),
    "draft rows stay": ("_missing", draft_rows_stay),
    "all nodes follow the last": ("restore", lambda self, rows: None),
}


@pytest.mark.parametrize(
    ("kind", "mutant", "make"),
    [
        ("eagle3", "shifted states", chain),
        ("eagle3", "draft rows stay", chain),
        ("eagle", "all nodes follow the last", tree),
        ("medusa", "shifted states", chain),
    ],
)
def test_wrong_rows_are_detected(
    kind: str, mutant: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchCachedHead, *MUTANTS[mutant])
    head = TorchEagle3 if kind == "eagle3" else None
    assert converse(tmp_path, "torch", kind=kind, make=make, head=head).deviates_by(1e-2)


class DraftPositionsShifted(TorchEagle3):
    """Draft rows have the positions after theirs."""

    def draft(self, text: TorchCachedHead, token: int) -> Tensor:
        text.cache.angles = text.cache.angles.roll(-1, 1)
        state = super().draft(text, token)
        text.cache.angles = text.cache.angles.roll(1, 1)
        return state


def test_wrong_positions_are_detected(tmp_path: Path) -> None:
    assert converse(tmp_path, head=DraftPositionsShifted).deviates_by(1e-2)


def test_texts_are_not_cached_longer_than_the_target(tmp_path: Path) -> None:
    conversation = converse(tmp_path)
    cached: Any = conversation.head
    conversation.target.head = cached
    assert cached.cache.kv_bytes > 0 and conversation.target.kv_bytes > cached.cache.kv_bytes
    conversation.target.close()
    assert cached.cache.kv_bytes == 0 and not cached.cache.kv.any() and not cached.state.any()
