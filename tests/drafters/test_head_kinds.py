"""Heads of all kinds on small models: exact by enumeration as chain and tree, runs, refusals."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.enumeration import PROMPT, ROUNDING, VOCAB, distance, reference_probs
from fakes.heads import BLOCK, RANK, checkpoint, dflash_config, dflash_tensors, opened, save_head
from fakes.native_models import CONFIGS, random_model
from fakes.tiny_models import EnumeratedVerifier, Explorer, byte_level_tokenizer, committed, run, save_model, up_to
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from specdemo.core.errors import UserError
from specdemo.core.events import Header, StepEvent
from specdemo.core.policies import POLICIES, Fixed, PathProbability, Policy
from specdemo.core.rules import RULES
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ChainDrafter
from specdemo.drafters.tree import TreeDrafter
from specdemo.generate import generate
from specdemo.models import heads
from specdemo.models.cached_head import CachedHead, Head
from specdemo.models.chat_caches import Stores
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native_weights import NativeWeights
from specdemo.models.engines.torch_head import TorchCachedHead, TorchHead
from specdemo.models.head_kinds import HeadKind
from specdemo.models.heads import load_head
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import HeadSpec, ModelSpec
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.config import CloudConfig

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TARGET = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5)
KINDS = ("medusa", "eagle", "eagle3", "dflash", "dspark", "mixing")
SAMPLING = {
    "plain": SamplingParams(),
    "processed": SamplingParams(top_k=3, repetition_penalty=1.5),
    "greedy": SamplingParams(temperature=0),
}


class MixingHead(TorchHead):
    """A row is a product of the row before, or the target's final state, with the embedding of the token."""

    kind = "eagle"

    def longest_draft(self, length: int) -> int:
        return 6

    def projected_states(self, states: torch.Tensor) -> torch.Tensor:
        return states[:, 0]

    def forward(self, text: TorchCachedHead, rows: torch.Tensor, following: list[int]) -> torch.Tensor:
        embedded = self.embedded(torch.tensor(following[-1:]))
        return self.linear("mix", torch.cat([rows[-1:], embedded], -1)).tanh()

    def logits(self, text: TorchCachedHead, token: int) -> torch.Tensor:
        return torch.nn.functional.linear(text.state, self.output_rows(self.ids))[0]


MIXING = HeadKind(
    name="mixing",
    fits=lambda config: config.values.get("architectures") == ["MixingHead"],
    taps=lambda config, layers: [layers],
    shapes=lambda checkpoint, stored: {"mix.weight": (checkpoint.target_width, 2 * checkpoint.target_width)},
    make=MixingHead,
    has_layers=False,
)


@pytest.fixture(autouse=True)
def _mixing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of heads needs these two definitions and an entry."""
    monkeypatch.setattr(heads, "HEAD_KINDS", (*heads.HEAD_KINDS, MIXING))


def save(kind: str, folder: Path, target: Any, ids: list[int] | None = None) -> str:
    if kind == "mixing":
        torch.manual_seed(0)
        tensors = {"mix.weight": torch.randn(target.hidden_size, 2 * target.hidden_size)}
        return save_head(folder, tensors, {"architectures": ["MixingHead"]})
    return save_head(folder, *checkpoint(kind, target, ids))


@cache
def loaded(kind: str, where: Path) -> tuple[CachedModel, CachedHead]:
    """A random target of four tokens and a random head."""
    torch.manual_seed(4)
    weights, spec = LlamaWeights(LlamaForCausalLM(TARGET).eval()), ModelSpec("small/target")
    name = save(kind, where / kind, TARGET, [0, 1, 3])
    head = load_head(HeadSpec(name, spec), LoadedModel(spec, weights, None, 0, "native"))
    target = CachedModel(weights, taps=head.taps)
    return target, head.open(target)


@cache
def truth(target: CachedModel, sampling: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Distribution of autoregressive sampling, by multiplication."""
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, weight in texts.items():
            logits = target.score([*PROMPT, *text], Draft())[0].tolist()
            for token, chance in enumerate(reference_probs(logits, sampling, (*PROMPT, *text))):
                longer[(*text, token)] = weight * chance
        texts = longer
    return texts


def error(
    target: CachedModel, sampling: SamplingParams, drafter: Any, explorer: Explorer, rule: str, policy: Any
) -> tuple[float, list[int]]:
    """Return the distance of the text's distribution from the target's, and drafted, accepted and short drafts."""
    counts = [0, 0, 0]
    decided = ModelVerifier(target.score, sampling, RULES[rule].apply, explorer, explorer)
    verifier = EnumeratedVerifier(decided, explorer)

    def once() -> tuple[int, ...]:
        steps = run(PROMPT, verifier, drafter, policy(), 3)
        counts[0] += sum(len(step.draft) for step in steps)
        counts[1] += sum(len(step.verdict.accepted) for step in steps)
        counts[2] += sum(len(step.draft) < 2 for step in steps[1:-1])
        return tuple(committed(steps))

    return distance(explorer.distribution(once), truth(target, sampling, 3)), counts


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("plain", "chain"),
        ("processed", "tree"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("processed", "chain"), ("greedy", "chain"), ("greedy", "tree"))
        ),
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_text_of_random_heads_has_the_distribution_of_the_target(
    name: str, kind: str, shape: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target, head = loaded(kind, tmp_path_factory.getbasetemp() / "kinds")
    sampling, explorer = SAMPLING[name], Explorer()
    drafter: Any = ChainDrafter(head, sampling, explorer, VOCAB)
    if shape == "tree":
        drafter = TreeDrafter(head, sampling, explorer, VOCAB, nodes=4, width=2)
    deviation, counts = error(target, sampling, drafter, explorer, "rejection", partial(Fixed, 2))
    assert deviation < 10 * ROUNDING
    assert counts[0] > 0 and (counts[1] > 0 or name == "greedy")


# --- drafts that end by the head's confidence ------------------------------------------------------------------------

CONFIDENT = {"plain": SAMPLING["plain"], "top-p": SamplingParams(temperature=0.8, top_p=0.8)}


@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIDENT)
def test_drafts_that_end_by_confidence_are_exact(
    name: str, rule: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target, head = loaded("dspark", tmp_path_factory.getbasetemp() / "kinds")
    explorer = Explorer()
    drafter = ChainDrafter(head, CONFIDENT[name], explorer, VOCAB)
    policy = partial(PathProbability, 2, costs=(0.3,))
    deviation, counts = error(target, CONFIDENT[name], drafter, explorer, rule, policy)
    assert deviation < 10 * ROUNDING and counts[0] > 0 and counts[2] > 0


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A saved target and heads for it."""
    where = tmp_path_factory.mktemp("saved")
    target = str(save_model(where / "target", byte_level_tokenizer(), num_hidden_layers=4))
    config = AutoConfig.from_pretrained(target)
    return {"target": target, **{kind: save(kind, where / kind, config) for kind in ("medusa", "eagle3", "dspark")}}


@pytest.fixture(scope="module")
def pool() -> ModelPool:
    return ModelPool()


@pytest.mark.parametrize(("kind", "method"), [("medusa", "eagle"), ("dspark", "medusa")])
def test_methods_name_the_method_of_another_head(
    kind: str, method: str, saved: dict[str, str], pool: ModelPool
) -> None:
    recipe = Recipe(method=method, target=saved["target"], head=saved[kind], max_tokens=4, device="cpu")
    own = "block" if kind == "dspark" else kind
    with pytest.raises(UserError, match=f"the head is not of kind {method}: choose method {own} or hybrid"):
        list(generate(recipe, "class Point:\n    def", pool))


@pytest.mark.parametrize("method", ["block", "hybrid"])
def test_turns_end_drafts_by_confidence_and_keep_the_text(
    method: str, saved: dict[str, str], pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheap = Policy("", lambda lengths, costs: PathProbability(lengths.most))  # a tiny target costs no more than a head
    monkeypatch.setitem(POLICIES, "path", cheap)
    plain = Recipe(method="ar", target=saved["target"], max_tokens=12, temperature=0.0, device="cpu")
    drafting = replace(plain, method=method, head=saved["dspark"], policy="path")
    stores = Stores()
    for prompt in ("class Point:\n    def", "class Point:\n    def f():"):
        steps = [event.step for event in generate(drafting, prompt, pool, stores) if isinstance(event, StepEvent)]
        alone = [event.step for event in generate(plain, prompt, pool) if isinstance(event, StepEvent)]
        assert committed(steps) == committed(alone)
        drafted = [origin for step in steps for origin in step.draft.origin if origin.source == "head"]
        assert drafted and all(origin.confidence is not None for origin in drafted)


def test_drafts_end_with_the_context_of_the_head(tmp_path_factory: pytest.TempPathFactory) -> None:
    target, head = loaded("eagle3", tmp_path_factory.getbasetemp() / "kinds")
    inner: Any = head.head
    inner.layer, before = replace(inner.layer, context=8), inner.layer
    try:
        for length in range(4, 12):
            text = [0, 1] * (length // 2) + [3] * (length % 2)
            target.score(text, Draft())
            draft = ChainDrafter(head, SAMPLING["plain"], Noise(0, "draft"), VOCAB).propose(text, up_to(4))
            last = length - 2 + len(draft) - 1  # position of the row of the last draft token
            assert len(draft) == 4 or (last == 7 or not draft.tokens)
            assert bool(draft.tokens) == (length <= 9)
    finally:
        inner.layer = before


def test_a_run_loads_the_head_and_names_it(saved: dict[str, str]) -> None:
    models = {"target": saved["target"], "head": saved["eagle3"]}
    recipe = Recipe(method="eagle", max_tokens=12, temperature=0.0, device="cpu", **models)
    pool = ModelPool()
    events = list(generate(recipe, "class Point:\n    def", pool))
    (header,) = [event for event in events if isinstance(event, Header)]
    assert header.recipe["head"] == saved["eagle3"] and header.environment["drafter_bytes"] > 1000
    steps = [event.step for event in events if isinstance(event, StepEvent)]
    assert not steps[0].draft.tokens and all(step.draft.tokens for step in steps[1:-1])
    assert pool.heads and pool.weight_bytes > pool.get(plan_run(recipe).target).weight_bytes
    pool.unload(plan_run(recipe).target)
    assert not pool.heads


REMOTE = CloudConfig(remote="http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "eagle"}, "method eagle needs a head"),
        (
            {"method": "eagle", "target": "a/b", "head": "a/head", "cloud": REMOTE},
            "needs a local target: choose .*nasd",
        ),
        ({"method": "eagle", "pair": "flan-t5-large", "head": "a/head"}, "target has an encoder, .*nasd"),
        ({"method": "hybrid", "pair": "flan-t5-large", "head": "a/head"}, "omit head"),
    ],
)
def test_recipes_without_use_for_a_head_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Recipe(**values)


def test_a_head_replaces_the_draft_model_of_the_hybrid() -> None:
    assert plan_run(Recipe(method="hybrid", target="a/b", drafter="a/c")).drafter is not None
    recipe = Recipe(method="hybrid", target="a/b", drafter="a/c", head="a/head")
    assert plan_run(recipe).drafter is None and plan_run(recipe).head == HeadSpec("a/head", plan_run(recipe).target)
    assert "drafter" not in plan_run(recipe).models


# --- DFlash and DSpark: rows by content, branches of drafts, published layouts ----------------------------------------


CONFIG = CONFIGS["tied"]
IDS = [*range(0, 300, 3)]
WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}


@pytest.fixture(scope="module")
def weights() -> NativeWeights:
    return NativeWeights(random_model(CONFIG))


def read(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], weights: NativeWeights) -> Head:
    spec = ModelSpec("small/target")
    name = save_head(folder, tensors, config)
    return load_head(HeadSpec(name, spec), LoadedModel(spec, weights, None, 0, ""))


def head_of_kind(folder: Path, markov: bool, weights: NativeWeights) -> Head:
    config = dflash_config(CONFIG, len(IDS), markov)
    config["transformer_layer_config"] |= WINDOW
    return read(folder, dflash_tensors(CONFIG, IDS, markov), config, weights)


TEXTS = ([*range(9)], [*range(12)], [*range(10), 99, 98], [*range(4), *range(50, 62)])


def drafts(head: Head, weights: NativeWeights, keep: bool = True) -> list[Tensor]:
    """Return the logits of drafts for a text that grows, loses tokens and changes; `keep` its rows in between."""
    target, results = CachedModel(weights, taps=head.taps), []
    cached = head.open(target)
    for tokens in TEXTS:
        if not keep:
            target = CachedModel(weights, taps=head.taps)
            cached = head.open(target)
        target.score(tokens[:-1], Draft())
        logits = cached.start(tokens)
        assert logits is not None
        count = cached.longest_draft(tokens)
        results.append(torch.stack([logits, *(cached.step(3 * i) for i in range(1, count))]))
    return results


@pytest.mark.parametrize("markov", [False, True])
def test_kept_rows_give_the_drafts_of_a_recomputation(markov: bool, tmp_path: Path, weights: Any) -> None:
    head = head_of_kind(tmp_path, markov, weights)
    for kept, expected in zip(drafts(head, weights), drafts(head, weights, keep=False), strict=True):
        torch.testing.assert_close(kept, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("markov", [False, True])
def test_branches_of_a_draft_are_independent(markov: bool, tmp_path: Path, weights: Any) -> None:
    text, states = opened(head_of_kind(tmp_path, markov, weights)), torch.randn(6, 3, CONFIG.hidden_size)
    text.start_rows([*range(6)], states, 0)
    first = [text.step(token) for token in (3, 6)]
    text.start_rows([*range(6)], states, 0)
    text.step(3)
    rows = text.draft_rows()
    other = text.step(9)
    text.restore(rows)
    assert torch.equal(text.step(6), first[1])
    assert torch.equal(other, first[1]) == (not markov)  # without it, tokens of a draft are independent


@pytest.mark.parametrize("wrong", [-1, CONFIG.vocab_size])
def test_tokens_outside_the_vocabulary_are_refused(wrong: int, tmp_path: Path, weights: Any) -> None:
    text = opened(head_of_kind(tmp_path, True, weights))
    text.start_rows([*range(6)], torch.randn(6, 3, CONFIG.hidden_size), 0)
    with pytest.raises(ValueError, match="is outside the vocabulary of 301 tokens"):
        text.step(wrong)


def test_confidence_may_ignore_the_token_before(tmp_path: Path, weights: Any) -> None:
    """The weights of that token are then not stored."""
    tensors, config = dflash_tensors(CONFIG, IDS, True), dflash_config(CONFIG, len(IDS), True)
    state_weights = tensors["confidence_head.proj.weight"][:, : CONFIG.hidden_size]
    states, confidences = torch.randn(6, 3, CONFIG.hidden_size), []
    for with_markov in (True, False):
        padding = torch.zeros(1, RANK if with_markov else 0)
        tensors["confidence_head.proj.weight"] = torch.cat([state_weights, padding], -1)
        settings = config | {"confidence_head_with_markov": with_markov}
        text = opened(read(tmp_path / str(with_markov), tensors, settings, weights))
        text.start_rows([*range(6)], states, 0)
        confidences.append(text.confidence)
    assert confidences[0] == pytest.approx(confidences[1]) and 0 < confidences[0] < 1


def test_drafts_end_with_block_and_context(tmp_path: Path, weights: Any) -> None:
    for markov, first in ((False, 1), (True, 0)):
        config = dflash_config(CONFIG, len(IDS), markov)
        config["transformer_layer_config"]["max_position_embeddings"] = 12
        head = read(tmp_path / str(markov), dflash_tensors(CONFIG, IDS, markov), config, weights)
        for length in range(8, 15):
            count = head.longest_draft(length)
            assert count == max(0, min(BLOCK, 13 - length) - first)
            if count:
                states = torch.randn(length - 1, 3, CONFIG.hidden_size)
                logits = opened(head).start_rows([*range(length - 1)], states, 0)
                assert len(logits) == len(IDS)


@pytest.mark.parametrize("layout", ["z-lab", "DeepSpec"])
def test_published_layouts_are_those_of_speculators(layout: str, tmp_path: Path, weights: Any) -> None:
    """They nest no configuration of layers, and list outputs of layers instead of hidden states."""
    markov = layout == "DeepSpec"
    tensors, config = dflash_tensors(CONFIG, None, markov), dflash_config(CONFIG, CONFIG.vocab_size, markov)
    expected = drafts(read(tmp_path / "speculators", tensors, config, weights), weights)
    flat = config | config.pop("transformer_layer_config")
    taps, mask = [tap - 1 for tap in config.pop("aux_hidden_state_layer_ids")], config.pop("mask_token_id")
    own = {"target_layer_ids": taps, "mask_token_id": mask}
    architecture = "Qwen3DSparkModel" if markov else "DFlashDraftModel"
    flat |= {"architectures": [architecture], **(own if markov else {"dflash_config": own})}
    for key in ("speculators_model_type", "aux_hidden_state_layer_ids", "transformer_layer_config"):
        flat.pop(key, None)
    actual = drafts(read(tmp_path / layout, tensors, flat, weights), weights)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
