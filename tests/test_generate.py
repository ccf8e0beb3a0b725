"""One generation: what is kept between runs, and what is not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from fakes.tiny_models import TEMPLATE, byte_level_tokenizer, save_model

from specdemo.core.errors import UserError
from specdemo.core.step import Step
from specdemo.generate import generate
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

PROMPT = "for i in range(10):"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "target", byte_level_tokenizer()))


def run(recipe: Recipe, pool: ModelPool, stores: dict[Any, Any] | None = None) -> dict[str, Any]:
    *_, end = generate(recipe, PROMPT, pool, stores)
    return end["metrics"]


@pytest.mark.parametrize("levels", ["multi", "one"])
def test_kept_ngrams_draft_a_text_that_was_seen(target: str, levels: str) -> None:
    """The same greedy text again: all of it is known, so nearly everything drafted is accepted."""
    pool, stores = ModelPool(), {}
    recipe = Recipe(
        target=target, method="nasd", temperature=0, max_tokens=48, device="cpu", ngram_levels=levels, ngram_keep=True
    )
    first, second = run(recipe, pool, stores), run(recipe, pool, stores)
    assert second["accepted"] > first["accepted"] and second["steps"] < first["steps"]


def test_ngrams_are_forgotten_unless_asked_to_be_kept(target: str) -> None:
    pool, stores = ModelPool(), {}
    recipe = Recipe(target=target, method="nasd", temperature=0, max_tokens=48, device="cpu")
    first, second = run(recipe, pool, stores), run(recipe, pool, stores)
    assert not stores and second["accepted"] == first["accepted"] and second["drafted"] == first["drafted"]


def test_a_run_may_be_closed_at_any_step_and_the_next_is_not_affected(target: str) -> None:
    pool = ModelPool()
    recipe = Recipe(target=target, method="nasd", temperature=0, max_tokens=32, device="cpu")
    whole = [line["tokens"] for line in generate(recipe, PROMPT, pool) if "i" in line]
    for steps in (1, 3):
        cut = generate(recipe, PROMPT, pool)
        seen = [line for line, _ in zip((line for line in cut if "i" in line), range(steps), strict=False)]
        cut.close()
        assert len(seen) == steps
    assert [line["tokens"] for line in generate(recipe, PROMPT, pool) if "i" in line] == whole


def test_the_context_ends_the_text(target: str) -> None:
    tokens = len(byte_level_tokenizer().encode(PROMPT))
    *_, end = generate(Recipe(target=target, method="ar", max_tokens=5000, device="cpu"), PROMPT, ModelPool())
    assert end["end"] in ("length", "stop")
    assert end["metrics"]["tokens"] == 128 - tokens or end["end"] == "stop"


@pytest.mark.parametrize("method", ["ar", "draft", "nasd", "self", "tree", "lookahead"])
def test_equal_bits_are_claimed_for_chains_only(target: str, method: str) -> None:
    """The machine was asked about the rows of chains; a forest's rows stand at other places among the keys."""
    recipe = Recipe(method=method, target=target, drafter=target, temperature=0, max_tokens=4, device="cpu")
    head = next(line for line in generate(recipe, PROMPT, ModelPool()) if "specdemo" in line)
    found = head["environment"]["parity"]["equal"]
    assert head["bit_equal"] == (found and method not in ("tree", "lookahead"))


def test_the_heads_of_laws_are_in_the_trace_when_asked_for(target: str) -> None:
    recipe = Recipe(target=target, drafter=target, temperature=0.8, top_p=0.9, max_tokens=8, device="cpu", top=3)
    head, *steps, _ = (line for line in generate(recipe, PROMPT, ModelPool()) if "phase" not in line)
    drafted = 0
    for step in steps:
        assert Step.from_json(step).to_json().items() <= step.items()
        assert len(step["laws"]) == 1 + len(step["draft"])
        for node, (token, parent) in enumerate(zip(step["draft"], step["parents"], strict=True)):
            for probs, chance in (
                (step["laws"][parent + 1], step["p"][node]),
                (step["drafted"][node], step["q"][node]),
            ):
                top = dict(map(tuple, probs["top"]))
                assert 0 < len(top) <= 3 and sum(top.values()) <= 1 + 1e-5
                assert 0 <= probs["entropy"] <= math.log(head["vocab_size"])
                assert list(top.values()) == sorted(top.values(), reverse=True)
                assert top.get(token, chance) == pytest.approx(chance)
            drafted += 1
    assert drafted
    greedy = replace(recipe, temperature=0)
    step = next(line for line in generate(greedy, PROMPT, ModelPool()) if "i" in line)
    assert step["laws"][0]["entropy"] > 0 and step["laws"][0]["top"][0][0] == step["choices"][0][0]
    assert not any("laws" in line for line in generate(replace(recipe, top=0), PROMPT, ModelPool()))


def test_beams_are_committed_as_they_agree(target: str) -> None:
    recipe = Recipe(target=target, method="beam", max_tokens=16, num_beams=3, device="cpu")
    head, *steps, end = (line for line in generate(recipe, PROMPT, ModelPool()) if "phase" not in line)
    assert not head["exact"] and end["end"] in ("length", "stop") and end["metrics"]["tokens"] <= 16
    whole = "".join(step["text"] for step in steps)
    assert steps[0]["pending_text"] and not steps[-1]["pending_text"]
    tokens = [token for step in steps for token in step["tokens"]]
    tokenizer = ModelPool().take(recipe.target_spec).tokenizer
    assert tokenizer.decode([*head["prompt_tokens"], *tokens], skip_special_tokens=True) == PROMPT + whole


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return str(save_model(tmp_path_factory.mktemp("talker") / "target", tokenizer))


def test_a_chat_template_is_what_the_model_reads(talker: str, target: str) -> None:
    recipe = Recipe(target=talker, method="ar", temperature=0, max_tokens=4, device="cpu", chat=True)
    head = next(line for line in generate(recipe, "Hello", ModelPool()) if "specdemo" in line)
    assert head["prompt"] == "<user>Hello\n<assistant>"
    tokenizer = ModelPool().take(recipe.target_spec).tokenizer
    assert head["prompt_tokens"] == tokenizer.encode(head["prompt"], add_special_tokens=False)
    with pytest.raises(UserError, match="no chat template"):
        list(generate(replace(recipe, target=target), "Hello", ModelPool()))


def test_a_second_turn_reads_only_what_is_new(talker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text as without the cache, from fewer tokens read."""
    read: list[int] = []
    score = CachedModel._keep
    monkeypatch.setattr(
        CachedModel, "_keep", lambda self, *given: read.append(-(found := score(self, *given))[0]) or found
    )
    recipe = Recipe(target=talker, method="nasd", temperature=0, max_tokens=12, device="cpu", chat=True)
    pool, stores = ModelPool(), {}

    def turn(talk: list[dict[str, str]], stores: dict | None) -> tuple[str, int, int]:
        del read[:]
        head, *steps, _ = (line for line in generate(recipe, talk, pool, stores) if "phase" not in line)
        return "".join(line["text"] for line in steps), len(head["prompt_tokens"]), -read[0]

    talk = [{"role": "user", "content": "one"}]
    answer, first, held = turn(talk, stores)
    assert held == 0
    talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "two"}]
    again, length, held = turn(talk, stores)
    fresh, _, none = turn(talk, None)
    assert again == fresh and none == 0
    assert first <= held < length  # at least the first question; the answer as far as it is cut into the same tokens
