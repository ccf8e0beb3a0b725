"""Ends of a text: stop texts and stop tokens, the same for every method and at every position of a draft."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.heads import head_for
from fakes.tiny_models import byte_level_tokenizer, save_model
from fakes.trace_lines import step_events, text_of, tokens_of

from specdemo.core.events import End, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.drafters import METHODS
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

PROMPT = "for i in range(10):"
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = str(save_model(folder / "target", byte_level_tokenizer()))
    heads = {name: head_for(target, folder / name, name) for name in METHODS if METHODS[name].drafter == "head"}
    return {"target": target, "drafter": target, **heads}


@pytest.fixture(scope="module")
def recipe_of(models: dict[str, str]) -> Callable[..., Recipe]:
    def make(method: str, **values: Any) -> Recipe:
        used = METHODS[method]
        names = ["target", *(["drafter"] if used.uses_model else [])]
        head = {"head": models[method]} if used.drafter == "head" else {}
        sampling = {} if method == "beam" else {"temperature": 0}
        chosen = {name: models[name] for name in names} | head | sampling | {"device": "cpu", "max_tokens": MAX_TOKENS}
        return Recipe(method=method, **chosen, **values)

    return make


def decoded(recipe: Recipe, pool: ModelPool) -> tuple[list[StepEvent], End]:
    *events, end = generate(recipe, PROMPT, pool)
    return step_events(events), end


def piece_ends(steps: list[StepEvent]) -> Iterator[int]:
    length = 0
    for event in steps:
        for piece in event.pieces:
            length += len(piece)
            yield length


@pytest.mark.parametrize("method", METHODS)
def test_the_text_ends_before_a_stop_text_and_its_tokens_stay(
    method: str, recipe_of: Callable[..., Recipe], pool: ModelPool
) -> None:
    whole, _ = decoded(recipe_of(method), pool)
    text, tokens = text_of(whole), tokens_of(whole)
    assert len(text) > 12
    for start in (0, 5, len(text) - 4):
        stop = text[start : start + 3]
        first = text.find(stop)
        steps, end = decoded(recipe_of(method, stop_texts=("never", stop)), pool)
        kept = next(n for n, length in enumerate(piece_ends(whole), 1) if length >= first + len(stop))
        assert text_of(steps) == text[:first]
        assert tokens_of(steps) == tokens[:kept]
        assert end.reason == "stop" and end.metrics.tokens == kept
        assert end.metrics == Metrics.of(event.step for event in steps)


@pytest.mark.parametrize("last", [False, True])
def test_a_stopped_beam_search_has_no_pending_text(
    last: bool, recipe_of: Callable[..., Recipe], pool: ModelPool
) -> None:
    """Stop texts that end with the first, or last, token of a step before others are certain."""
    whole, _ = decoded(recipe_of("beam"), pool)
    step = next(event for event in whole if event.pieces)
    assert step.pending_text and len(step.pieces) > 1
    count = len(step.pieces) if last else 1
    steps, _ = decoded(recipe_of("beam", stop_texts=("".join(step.pieces[:count]),)), pool)
    stopped = steps[-1].step
    assert stopped.tokens == stopped.verdict.target_tokens == step.step.tokens[:count]
    assert (stopped.verdict.pending, steps[-1].pending_text) == ((), "")


def test_a_withheld_text_is_shown_at_the_end(recipe_of: Callable[..., Recipe], pool: ModelPool) -> None:
    whole, _ = decoded(recipe_of("nasd"), pool)
    steps, end = decoded(recipe_of("nasd", stop_texts=(text_of(whole)[-2:] + "never",)), pool)
    assert text_of(steps) == text_of(whole) and end.reason == "length"
