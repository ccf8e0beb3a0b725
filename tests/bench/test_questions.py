"""Questions in the format of Spec-Bench: reading, conversations, and figures per category."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fakes.bench_records import run
from fakes.tiny_models import TEMPLATE, byte_level_tokenizer, save_model

from specdemo.bench import measure
from specdemo.bench.questions import category_table, read_questions
from specdemo.core.events import Header
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

LINES = [
    {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Shorten it."], "reference": ["x"]},
    {"question_id": "q2", "category": "qa", "turns": ["Who was Ada?"]},
]


def written(path: Path, *lines: Any) -> Path:
    text = "\n\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, "utf-8")
    return path


def test_a_question_is_a_prompt_of_its_category(tmp_path: Path) -> None:
    path = written(tmp_path / "q.jsonl", *LINES)
    assert read_questions(path) == [
        Prompt("writing", "writing 81", "Write a poem.", later=("Shorten it.",)),
        Prompt("qa", "qa q2", "Who was Ada?"),
    ]
    assert [prompt.kind for prompt in read_questions(path, ["qa"])] == ["qa"]


def test_figures_per_category_are_ratios_of_sums() -> None:
    """AR: 10 tokens in 1 s. The lane: 20 tokens in 10 steps and 1 s, then 20 tokens in 10 steps and 4 s."""
    recipes = [Recipe(method="ar", temperature=0), Recipe(temperature=0, gamma=2)]
    records = [
        {"kind": kind, "name": f"{kind} 1", "runs": [run(1.0), run(wall, drafted=20)]}
        for kind, wall in (("writing", 1.0), ("qa", 4.0))
    ]
    head, _, row = category_table(recipes, records).splitlines()[2:]
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["lane", "writing", "qa", "all"]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["draft gamma=2 T=0", "2.00, 2.00x", "2.00, 0.50x", "2.00, 0.80x"]


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
def test_later_turns_follow_the_answer_of_the_baseline(
    chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(save_model(tmp_path / "target", byte_level_tokenizer(TEMPLATE)))
    common = {"target": target, "temperature": 0, "max_tokens": 6, "device": "cpu", "chat": chat}
    recipes = [Recipe(method=method, **common) for method in ("ar", "nasd")]
    prompts = [Prompt("writing", "writing 1", "Write a poem.", later=("Shorten it.",))]
    seen: list[Any] = []

    def recorded(recipe: Recipe, prompt: Any, pool: ModelPool) -> Any:
        for event in generate(recipe, prompt, pool):
            if isinstance(event, Header):
                seen.append((recipe.method, prompt))
            yield event

    monkeypatch.setattr(import_module("specdemo.bench.measure"), "generate", recorded)
    results = list(measure.measure(recipes, prompts, ModelPool()))
    items = [item for item in results if isinstance(item, dict)]
    assert [item["name"] for item in items] == ["writing 1"] * 2  # one cluster of the interval
    shown = [str(item) for item in results if isinstance(item, measure.BenchProgress)]
    assert any("3 of 4: writing 1, turn 2" in line for line in shown)
    answer = items[0]["runs"][0]["answer"]
    contents = ["Write a poem.", answer, "Shorten it."]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    for method, prompt in seen[-2:]:
        assert list(prompt) == messages if chat else prompt == "\n".join(contents)
        assert answer and method in ("ar", "nasd")
