"""Real architectures: greedy text and logits equal those of transformers without a cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from fakes.tiny_models import CONFIGS, CONTEXT, Counting, ForestDrafter, blurred, committed, run, tiny_model
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from specdemo.core import sampling as core_sampling
from specdemo.core.decode import DraftBudget, Drafter
from specdemo.core.errors import UserError
from specdemo.core.metrics import Metrics
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection, top1
from specdemo.core.sampling import Noise, SamplingParams, SharedNoise
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.model import ModelDrafter
from specdemo.drafters.ngram import NGramDrafter
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.native import sampling as native_sampling

pytestmark = [pytest.mark.slow, pytest.mark.long]

GREEDY = SamplingParams(temperature=0)
NOISE = Noise(0, "unused when greedy")
VOCAB = 61


def prompts(kind: str) -> Iterator[tuple[list[int], int]]:
    """Yield 24 prompts with output lengths: single tokens, repetitive, up to the context limit, random."""
    rng = random.Random(kind)
    for i in range(24):
        if i < 3:
            yield [rng.randrange(VOCAB)], 12
        elif i < 7:
            length = rng.choice((CONTEXT - 1, CONTEXT - 2, CONTEXT - 9))
            yield [rng.randrange(VOCAB) for _ in range(length)], CONTEXT - length
        elif i < 12:
            yield [rng.randrange(VOCAB) for _ in range(3)] * rng.randrange(2, 6), 16
        else:
            yield [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 24))], rng.randrange(1, 20)


def generated(model: PreTrainedModel, prompt: list[int], length: int) -> list[int]:
    """Oracle: greedy search of transformers."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@cache
def generated_texts(kind: str) -> list[list[int]]:
    """Texts of transformers for `prompts(kind)`, computed once for both engines."""
    model = tiny_model(kind)
    return [generated(model, prompt, length) for prompt, length in prompts(kind)]


@pytest.mark.parametrize("kind", [*CONFIGS, "llama lean", "qwen2 lean", "qwen3 lean"])
def test_greedy_text_equals_transformers(kind: str) -> None:
    """Draft with a model and one other drafter or rule per prompt; gammas and the others alternate."""
    kind, _, lean = kind.partition(" ")
    model = tiny_model(kind)
    small = blurred(model, kind)
    engines = (LlamaWeights(model), LlamaWeights(small)) if lean else (model, small)
    names = ("model", "n-grams", "top1", "forest")[: 3 if "sliding" in kind else 4]
    totals = {name: Metrics() for name in names}

    def drafts() -> ModelDrafter:
        return ModelDrafter(CachedModel(engines[1]).score, GREEDY, NOISE, VOCAB)

    for i, ((prompt, length), expected) in enumerate(zip(prompts(kind), generated_texts(kind), strict=True)):
        drafters: dict[str, Drafter] = {"model": drafts(), "n-grams": NGramDrafter(4, "multi", 3), "top1": drafts()}
        drafters["forest"] = ForestDrafter(drafts(), VOCAB, seed=i)
        other = names[1 + i % (len(names) - 1)]
        gamma = (1, 2, 4, 8)[i // 3 % 4]
        for name in ("model", other):
            rule = top1 if name == "top1" else rejection
            verifier = ModelVerifier(CachedModel(engines[0]).score, GREEDY, rule, NOISE, NOISE, candidates=3)
            steps = run(prompt, verifier, drafters[name], Fixed(gamma), length)
            assert committed(steps) == expected, (name, gamma, prompt)
            for step in steps:
                totals[name] = totals[name].plus(step)
    for name, metrics in totals.items():
        assert metrics.drafted > metrics.accepted > 0, name


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if "sliding" not in kind])
def test_forest_rows_equal_their_own_paths(kind: str) -> None:
    """Logits of each node equal those of its path alone, also after a path of the previous forest was accepted."""
    model = tiny_model(kind)
    cached = CachedModel(model)
    rng = random.Random(0)
    tokens = [5, 9, 5]
    for _ in range(8):
        size = rng.randrange(1, 7)
        draft = Draft(
            tuple(rng.randrange(VOCAB) for _ in range(size)), tuple(rng.randrange(-1, i) for i in range(size))
        )
        rows = cached.score(tokens, draft)
        for node in range(-1, size):
            path = tokens + [draft.tokens[i] for i in draft.path(node)]
            alone = model(torch.tensor([path])).logits[0, -1]
            assert torch.allclose(rows[node + 1], alone, rtol=1e-3, atol=1e-4)
        tokens = tokens + [draft.tokens[i] for i in draft.path(size - 1)] + [rng.randrange(VOCAB)]


def test_forests_on_a_sliding_window_raise() -> None:
    cached = CachedModel(tiny_model("mistral-sliding"))
    with pytest.raises(UserError, match="sliding window"):
        cached.score([1, 2], Draft((3, 4), (-1, -1)))


def test_recurrent_models_raise() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(UserError, match="cannot take back"):
        CachedModel(model)


@pytest.mark.parametrize("kind", CONFIGS)
def test_cache_feeds_only_new_tokens(kind: str) -> None:
    model = tiny_model(kind)
    count, cached = Counting(model), CachedModel(model)
    cached.score([1, 2, 3], Draft())
    cached.score([1, 2, 3, 4], Draft.chain((5, 6)))  # drafts 5, 6
    cached.score([1, 2, 3, 4, 5, 6, 7], Draft())  # all accepted, 7 is the bonus
    cached.score([1, 2, 3, 4, 5, 8], Draft())  # 6 removed
    cached.score([1, 2, 3, 4, 5, 8], Draft())  # the same again: known
    cached.score([9], Draft())  # another text
    assert count.rows == [3, 3, 1, 1, 1]
    assert cached.kv_bytes > 0


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_forest_that_grows_or_is_thinned_is_fed_node_by_node(kind: str) -> None:
    """Nodes scored before are not scored again, at any index in the new forest."""
    model = tiny_model(kind)
    count, cached = Counting(model), CachedModel(model)
    forests = [
        ([1, 2, 3], Draft((4, 5), (-1, -1)), 5),
        ([1, 2, 3], Draft((4, 5, 6, 7, 6), (-1, -1, 0, 0, 1)), 3),  # three leaves more
        ([1, 2, 3], Draft((5, 4, 6, 7, 8), (-1, -1, 0, 1, 3)), 1),  # thinned, in another order, and grown
        ([1, 2, 3, 4], Draft((7, 8, 9), (-1, 0, -1)), 1),  # its root committed
        ([1, 2, 3, 4, 7, 8], Draft(), 0),
        ([1, 2, 3, 4, 7], Draft((8, 1), (-1, -1)), 3),  # shorter than the cache: the forest is fed again
        ([1, 2, 3, 4, 7], Draft((2, 8), (-1, -1)), 2),  # a new node with a known child
    ]
    for tokens, draft, rows in forests:
        count.rows.clear()
        found = cached.score(tokens, draft)
        assert sum(count.rows) == rows
        expected = CachedModel(model).score(tokens, draft)
        assert torch.allclose(found, expected, atol=1e-5)


def test_mutant_cache_that_forgets_to_roll_back() -> None:
    """Keeping rejected positions changes the text, which the greedy test above would see."""

    class Stale(CachedModel):
        def _keep(self, tokens: list[int], draft: Draft) -> tuple[int, torch.Tensor]:
            kept, known = super()._keep(tokens, draft)
            extra = len(self._held) + len(self._draft) - kept if self._held else 0
            if extra > 1:
                for layer in self._cache.decoder.layers:
                    layer.length = kept + 1  # one rejected position survives
            return kept, known

    model = tiny_model("llama")
    small = blurred(model, "llama", noise=0.3)
    different = 0
    for (prompt, length), expected in list(zip(prompts("llama"), generated_texts("llama"), strict=True))[12:]:
        drafter = ModelDrafter(CachedModel(small).score, GREEDY, NOISE, VOCAB)
        verifier = ModelVerifier(Stale(model).score, GREEDY, rejection, NOISE, NOISE)
        different += committed(run(prompt, verifier, drafter, Fixed(4), length)) != expected
    assert different > 0


def test_mutant_drafter_that_forgets_its_last_draft() -> None:
    """After a full accept the last draft must be fed to the drafter; omitting it lowers acceptance."""

    def accepted(skip: bool, seed: int) -> int:
        model = tiny_model("llama", seed)
        cached = CachedModel(model)

        class Forgetful:
            def __init__(self) -> None:
                self.seen: list[int] = []

            def score(self, tokens: list[int], draft: Draft) -> torch.Tensor:
                if skip and len(tokens) == len(self.seen) + 2:
                    tokens = [*self.seen, tokens[-1]]  # the last draft never reaches the cache
                self.seen = list(tokens)
                return cached.score(tokens, draft)

        drafter = ModelDrafter(Forgetful().score, GREEDY, NOISE, VOCAB)
        verifier = ModelVerifier(CachedModel(model).score, GREEDY, rejection, NOISE, NOISE)
        return sum(len(step.verdict.accepted) for step in run([3, 1, 4], verifier, drafter, Fixed(3), 24))

    lost = [accepted(skip=False, seed=seed) - accepted(skip=True, seed=seed) for seed in range(4)]
    assert min(lost) >= 0 and sum(lost) >= 3


READS = (
    "tolist",
    "item",
    "__int__",
    "__float__",
    "__bool__",
    "__index__",
)  # operations that synchronise with the device


@pytest.mark.parametrize("kind", ["llama", "llama lean", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_are_equal_and_host_synchronisation_is_independent_of_length(
    kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _, lean = kind.partition(" ")
    monkeypatch.setattr(core_sampling, "is_on_host", lambda x: False)
    monkeypatch.setattr(native_sampling, "supports", lambda *tensors: False)
    model: Any = LlamaWeights(tiny_model(kind)) if lean else tiny_model(kind)
    sampling, reads = SamplingParams(temperature=temperature), Counter()

    def counting(read: Any) -> Any:
        def counted(tensor: torch.Tensor, *args: Any) -> Any:
            reads.update(["waits"])
            return read(tensor, *args)

        return counted

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
    found = []
    for length in (2, 5):
        by_one, at_once = CachedModel(model), CachedModel(model)
        slow = ModelDrafter(by_one.score, sampling, SharedNoise(3), VOCAB)
        fast = ModelDrafter(at_once.score, sampling, SharedNoise(3), VOCAB, extend=at_once.extend)
        tokens = [5, 9, 5]
        for bonus in (1, 2, 3):  # accept the draft, add a bonus token
            expected = slow.propose(tokens, DraftBudget(length, Fixed(length)))
            reads.clear()
            draft = fast.propose(tokens, DraftBudget(length, Fixed(length)))
            assert draft.tokens == expected.tokens and len(draft) == length
            if temperature:
                assert draft.token_probs == pytest.approx(expected.token_probs, rel=1e-4)
                assert torch.allclose(draft.probs.dense(), expected.probs.dense(), atol=1e-5)
            tokens = [*tokens, *draft.tokens, bonus]
        found.append(reads["waits"])
    assert 0 < found[0] == found[1]


def test_broken_logits_raise_in_chains() -> None:
    model = tiny_model("llama")
    model.lm_head.weight[3] = torch.nan
    cached = CachedModel(model)
    drafter = ModelDrafter(cached.score, SamplingParams(), NOISE, VOCAB, extend=cached.extend)
    with pytest.raises(UserError, match="NaN"):
        drafter.propose([1, 2], DraftBudget(3, Fixed(3)))


def test_a_pass_that_broke_leaves_a_usable_cache() -> None:
    model = tiny_model("llama")
    cached = CachedModel(model)
    expected = cached.score([1, 2, 3, 4], Draft())
    hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cached.score([1, 2, 3, 4, 5, 6], Draft())
    hook.remove()
    assert torch.allclose(cached.score([1, 2, 3, 4], Draft()), expected, atol=1e-5)
