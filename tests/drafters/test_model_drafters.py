"""Models that draft: re-encoding of another vocabulary, and the target with fewer layers."""

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.heads import head_for
from fakes.tiny_models import (
    TEXTS,
    byte_level_tokenizer,
    committed,
    run,
    save_model,
    sentencepiece_tokenizer,
    tiny_model,
)
from fakes.traces import run_of
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from specdemo.core.decode import DraftBudget, EmptyDrafter
from specdemo.core.errors import UserError
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft
from specdemo.core.verifier import ModelVerifier
from specdemo.drafters.chain import ModelDrafter, UniversalDrafter
from specdemo.drafters.suffix import SuffixDrafter
from specdemo.models.engines.llama_weights import LlamaWeights, with_layers
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import TAIL, Bridge
from specdemo.models.zoo import PAIRS
from specdemo.recipe import METHODS, POLICIES, Recipe, plan_run

pytestmark = pytest.mark.slow

BUNDLED = PAIRS["bundled"]
TEXT = (
    "".join(TEXTS) * 2
    + "x  =  'a b'\n\n\n\tif naïve_東京 == '🙂🙃':  # 1234567890\n        return unbelievable(café)\n" * 3
)
TOKENIZERS = {
    "byte-level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "bundled": lambda: AutoTokenizer.from_pretrained(BUNDLED.target),
}
WAYS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


class Spy:
    """Tokenizer that records the length of the text it tokenizes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self.lengths = tokenizer, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.lengths.append(len(text))
        return self._tokenizer(text, **options)


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), WAYS)
def test_incremental_encoding_equals_encoding_at_once(ours: str, theirs: str) -> None:
    target, drafter = TOKENIZERS[ours](), TOKENIZERS[theirs]()
    tokens = encode(target, TEXT)
    for seed in range(3):
        rng, bridge, end = random.Random(seed), Bridge(target, drafter, [7]), 0
        while end < len(tokens):
            end += rng.randrange(1, 6)
            own = bridge.read(tokens[:end])
            whole = decode(target, tokens[:end])
            assert whole.startswith(decode(drafter, own[1:]))  # incomplete characters are left out
        assert own == [7, *encode(drafter, TEXT)]


@pytest.mark.parametrize(("ours", "theirs"), WAYS)
def test_the_cost_of_a_step_is_independent_of_the_text_length(ours: str, theirs: str) -> None:
    target, drafter = Spy(TOKENIZERS[ours]()), Spy(TOKENIZERS[theirs]())
    tokens = encode(target, TEXT * 8)
    bridge = Bridge(target, drafter, [])
    bridge.read(tokens[:40])
    target.lengths.clear(), drafter.lengths.clear()
    for end in range(43, len(tokens), 9):
        bridge.read(tokens[:end])
        bridge.write(tokens[:end], encode(drafter, " x"))
    assert max(drafter.lengths) < 12 * TAIL and max(target.lengths) < 12 * TAIL < len(TEXT)


# --- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "theirs"), WAYS)
def test_drafts_continue_the_text(ours: str, theirs: str) -> None:
    """Drafter with a known continuation: its words are converted to the target's tokens."""
    target, drafter = TOKENIZERS[ours](), TOKENIZERS[theirs]()
    tokens, own = encode(target, TEXT), encode(drafter, TEXT)
    bridge, carried, same = Bridge(target, drafter, []), 0, 0
    for end in range(20, len(tokens) - 8):
        read = bridge.read(tokens[:end])
        if own[: len(read)] != read:
            continue  # the text ends inside a word of the drafter, so its tokens would differ
        new = own[len(read) : len(read) + 4]
        found = bridge.write(tokens[:end], new)
        assert TEXT.startswith(decode(target, tokens[:end] + found).rstrip("\ufffd"))
        carried += bool(found)
        same += found[:1] == tokens[end : end + 1]
    assert carried > 100 and same > 0.9 * carried


@pytest.mark.parametrize(("ours", "theirs"), WAYS)
def test_drafts_are_re_encoded_exactly_or_dropped(ours: str, theirs: str) -> None:
    """Random ids on both sides: partial characters, special tokens, misplaced spaces."""
    target, drafter = TOKENIZERS[ours](), TOKENIZERS[theirs]()
    carried = 0
    for seed in range(40):
        rng = random.Random(seed)
        bridge, tokens = Bridge(target, drafter, []), encode(target, "def f(x):")
        for _ in range(12):
            tokens = [*tokens, *(rng.randrange(len(target)) for _ in range(rng.randrange(1, 4)))]
            own = list(bridge.read(tokens))
            new = [rng.randrange(len(drafter)) for _ in range(4)]
            found = bridge.write(tokens, new)
            said = decode(drafter, own + new)[len(decode(drafter, own)) :]
            if found:
                carried += 1
                before, after = decode(target, tokens), decode(target, tokens + found)
                added = after[len(before.rstrip("\ufffd")) :]
                assert added and said.startswith(added)
                assert not set(found) & set(target.all_special_ids)
    assert carried > 30


def test_partial_words_are_completed() -> None:
    """The text ends in a partial word with a non-canonical tokenization: the draft continues from it."""
    target, drafter = AutoTokenizer.from_pretrained(BUNDLED.target), byte_level_tokenizer()
    assert len(encode(target, "    return")) < len(encode(target, "    re") + encode(target, "turn"))
    tokens = encode(target, "def f(x):\n    re")
    bridge = Bridge(target, drafter, [])
    bridge.read(tokens)
    assert decode(target, bridge.write(tokens, encode(drafter, "turn x"))) == "turn x"


# --- drafting ----------------------------------------------------------------------------------------------------


def test_drafts_fit_the_budget_and_the_context_of_the_drafter() -> None:
    """Tokens of one vocabulary become more tokens of the other: never more than the budget."""
    fine, coarse = byte_level_tokenizer(), AutoTokenizer.from_pretrained(BUNDLED.target)
    text = "unbelievable = continue_\n" * 6  # short words for the fine tokenizer, long words for the coarse tokenizer
    tokens = encode(fine, text)

    def drafted(limit: int, context: int) -> Draft:
        bridge = Bridge(fine, coarse, [])
        drafter = UniversalDrafter(SuffixDrafter(), bridge.read, bridge.write, context)
        return drafter.propose(tokens, DraftBudget(limit, Fixed(limit)))

    own = len(encode(coarse, text))
    assert own < 0.7 * len(tokens)
    assert [len(drafted(limit, 999)) for limit in (1, 3, 7)] == [1, 3, 7]
    assert drafted(7, 999).probs is None and drafted(7, 999).token_probs is None
    assert len(drafted(7, own)) == 0 < len(drafted(7, own + 1)) <= len(drafted(7, own + 2))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Bundled drafter in other vocabularies: all ids exchanged, and additionally with fewer merges."""
    root = tmp_path_factory.mktemp("strangers")
    return {name: disguised(root / name, merges) for name, merges in (("exchanged", None), ("coarser", 1500))}


def disguised(folder: Path, merges: int | None) -> str:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED.drafter)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED.drafter)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"] for token in state["added_tokens"]}
    old = sorted(set(tokenizer.get_vocab().values()) - special)
    new = random.Random(0).sample(old, len(old))
    to = {i: i for i in special} | dict(zip(old, new, strict=True))
    state["model"]["vocab"] = {text: to[i] for text, i in state["model"]["vocab"].items()}
    state["model"]["merges"] = state["model"]["merges"][:merges]
    rows = torch.tensor([to[i] for i in range(len(to))])
    weights = {layer.weight.data_ptr(): layer.weight for layer in (model.model.embed_tokens, model.lm_head)}
    with torch.no_grad():
        for weight in weights.values():
            weight[rows] = weight[: len(rows)].clone()
    model.save_pretrained(folder)
    other = Tokenizer.from_str(json.dumps(state))
    eos = tokenizer.eos_token
    PreTrainedTokenizerFast(tokenizer_object=other, eos_token=eos, bos_token=eos).save_pretrained(folder)
    return str(folder)


def test_the_bundled_target_with_drafters_of_other_vocabularies(strangers: dict[str, str]) -> None:
    """Greedy and coupled text equals AR decoding; exchanged ids keep the acceptance, other words reduce it."""
    pool, prompt = ModelPool(), "def fibonacci(n):\n"
    base = Recipe(
        target=BUNDLED.target, drafter=BUNDLED.drafter, universal=True, temperature=0, max_tokens=48, device="cpu"
    )
    plain, _ = run_of(replace(base, method="ar"), prompt, pool)
    own, usual = run_of(base, prompt, pool)
    assert own == plain
    warm = replace(base, temperature=0.8, rule="coupled", max_tokens=32)
    coupled, _ = run_of(replace(warm, method="ar"), prompt, pool)
    for name, stranger in strangers.items():
        for method in ("draft", "hybrid"):
            text, metrics = run_of(replace(base, drafter=stranger, method=method), prompt, pool)
            assert text == plain and metrics["drafted"] > metrics["accepted"] > 10, (name, method)
            if (name, method) == ("exchanged", "draft"):
                # a wrong draft may be a non-canonical tokenization, which has fewer tokens when encoded again
                assert metrics["accepted"] == usual["accepted"] and metrics["drafted"] <= usual["drafted"]
        text, metrics = run_of(replace(warm, drafter=stranger), prompt, pool)
        assert text == coupled and metrics["accepted"] > 0
    changed = replace(
        warm, drafter=strangers["coarser"], rule="rejection", bad_words=("import",), repetition_penalty=1.1
    )
    assert run_of(changed, prompt, pool)[1]["accepted"] > 0


def test_different_vocabularies_require_the_option(strangers: dict[str, str]) -> None:
    recipe = Recipe(target=BUNDLED.target, drafter=strangers["exchanged"], device="cpu")
    with pytest.raises(UserError, match=r"the tokenizers .* differ in .*re-encoded \(universal\)"):
        run_of(recipe, "x", ModelPool())
    with pytest.raises(UserError, match="method tree needs one vocabulary"):
        run_of(replace(recipe, universal=True, method="tree"), "x", ModelPool())


# --- self-speculation -------------------------------------------------------------------------------------------------


GREEDY, NOISE = SamplingParams(temperature=0), Noise(0, "unused when greedy")
TOKENS = [5, 9, 5, 7, 1]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gpt-neox", "mistral-sliding"])
def test_a_model_with_layers_left_out(kind: str) -> None:
    """Equal to a model built from the remaining layers only; its drafts leave the text unchanged."""
    model = tiny_model(kind)
    early = with_layers(model, [0])
    assert {p.data_ptr() for p in early.parameters()} < {p.data_ptr() for p in model.parameters()}
    rows = CachedModel(early).score(TOKENS[:2], Draft.chain(tuple(TOKENS[2:])))
    config = type(model.config).from_dict(model.config.to_dict())
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    alone = AutoModelForCausalLM.from_config(config).eval()
    alone.load_state_dict(model.state_dict(), strict=False)
    assert torch.allclose(rows, alone(torch.tensor([TOKENS])).logits[0, 1:], atol=1e-4)

    def text(drafter: object) -> list[int]:
        verifier = ModelVerifier(CachedModel(model).score, GREEDY, rejection, NOISE, NOISE)
        return committed(run(TOKENS, verifier, drafter, Fixed(3), 20))  # type: ignore[arg-type]

    assert text(ModelDrafter(CachedModel(early).score, GREEDY, NOISE, 61)) == text(EmptyDrafter())
    whole = CachedModel(model).score(TOKENS, Draft())
    assert torch.allclose(whole, model(torch.tensor([TOKENS])).logits[0, -1:], atol=1e-4)  # the full model is unchanged


@pytest.mark.parametrize("kept", [[0], [1]])
def test_lean_models_skip_any_layer(kept: list[int]) -> None:
    model = tiny_model("llama")
    alone = copy.deepcopy(model)  # because all tiny models share one configuration
    alone.model.layers = torch.nn.ModuleList([alone.model.layers[i] for i in kept])
    alone.config.num_hidden_layers = 1
    alone.model.layers[0].self_attn.layer_idx = 0
    early = CachedModel(with_layers(LlamaWeights(model), kept))
    assert torch.allclose(early.score(TOKENS, Draft()), alone(torch.tensor([TOKENS])).logits[0, -1:], atol=1e-4)


@pytest.mark.parametrize("kept", [[], [0, 1], [2]])
def test_invalid_layers_are_refused(kept: list[int]) -> None:
    for model in (tiny_model("llama"), LlamaWeights(tiny_model("llama"))):
        with pytest.raises(UserError, match="layers 0 to 1"):
            with_layers(model, kept)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.drafts])
def test_methods_give_ar_text_under_every_policy(method: str, tmp_path: Path) -> None:
    """Self-speculation stores no weights except the target's."""
    folder = str(save_model(tmp_path / "model", byte_level_tokenizer()))
    pool, drafted, prompt = ModelPool(), 0, "def add(a, b):\n    add(a, b)\n"
    head = head_for(folder, tmp_path / "head", method) if METHODS[method].drafter == "head" else None
    common = {"target": folder, "drafter": folder, "temperature": 0, "max_tokens": 32, "device": "cpu"}
    plain, _ = run_of(Recipe(method="ar", **common), prompt, pool)
    policies = POLICIES if method in ("draft", "eagle") else ("fixed", "path", "auto")
    for policy, rule in [*((policy, "rejection") for policy in policies), ("fixed", "match"), ("fixed", "coupled")]:
        recipe = replace(Recipe(), method=method, policy=policy, rule=rule, head=head, **common)
        text, metrics = run_of(recipe, prompt, pool)
        assert text == plain and len(text) == 32, (policy, rule)
        drafted += metrics["drafted"]
    assert drafted > 0
    if METHODS[method].drafter is None:
        assert pool.weight_bytes == pool.get(plan_run(recipe).target).weight_bytes
