"""Prompts as token ids, and runs without KV cache."""

import gc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fakes.heads import head_for
from fakes.tiny_models import byte_level_tokenizer
from fakes.trace_lines import tokens_of

from specdemo.core.errors import UserError
from specdemo.core.events import Header
from specdemo.generate import generate
from specdemo.models.cached_head import CachedHead
from specdemo.models.chat_caches import Stores
from specdemo.models.engines.engine import Cache
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.uncached import UncachedModel
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig
from specdemo.ui.lane import baseline_of

PROMPT = "for i in range(10):"
LOCAL_METHODS = "ar draft nasd tree self eagle medusa block hybrid lookahead beam".split()


def decoded(recipe: Recipe, prompt: Any, pool: ModelPool, stores: Stores | None = None) -> tuple[Header, list[int]]:
    events = list(generate(recipe, prompt, pool, stores))
    return next(event for event in events if isinstance(event, Header)), tokens_of(events)


def drafter_of(method: str, target: str, folder: Path) -> dict[str, str]:
    if method in ("eagle", "medusa", "block"):
        return {"head": head_for(target, folder, method)}
    return {"drafter": target} if method in ("draft", "tree", "hybrid") else {}


@pytest.mark.parametrize("method", ["ar", "nasd"])
def test_token_ids_continue_as_their_text(method: str, target: str, pool: ModelPool) -> None:
    recipe = Recipe(target=target, method=method, temperature=0, max_tokens=8, device="cpu")
    header, tokens = decoded(recipe, PROMPT, pool)
    again, same = decoded(recipe, list(header.prompt_tokens), pool)
    assert same == tokens and again.prompt == PROMPT and again.prompt_tokens == header.prompt_tokens
    split = [*byte_level_tokenizer().encode("for"), *byte_level_tokenizer().encode(" i")]
    assert decoded(recipe, split, pool)[0].prompt_tokens == tuple(split)


@pytest.mark.parametrize(
    ("prompt", "values", "sentence"),
    [
        ([1, 2], {"chat": True}, "token ids takes no chat template: set chat to False"),
        ([1, "2"], {}, "must contain whole numbers only, not '2'"),
        ([1, 1 << 40], {}, "is not among the .* token ids"),
        ([1, -1], {}, "-1 is not among the .* token ids"),
        ([], {}, "the prompt is empty"),
        ([1.5, 2], {}, "the prompt is invalid"),
        (["text"], {}, "the prompt is invalid"),
        ({"role": "user", "content": "x"}, {"chat": True}, "the prompt is invalid"),
        ([{"role": "user"}], {"chat": True}, "messages with a content"),
        ([{"role": "user", "content": ["x"]}], {"chat": True}, "a content that is a text"),
        ([{"role": "user", "content": "x"}], {}, "messages need a chat template"),
    ],
)
def test_wrong_prompts_are_refused(
    prompt: Any, values: dict[str, Any], sentence: str, target: str, pool: ModelPool
) -> None:
    recipe = Recipe(target=target, method="ar", max_tokens=2, device="cpu", **values)
    with pytest.raises(UserError, match=sentence):
        decoded(recipe, prompt, pool)


@pytest.mark.parametrize("method", LOCAL_METHODS)
def test_without_cache_the_text_is_the_same_and_every_pass_computes_all_tokens(
    method: str, target: str, pool: ModelPool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = {} if method == "beam" else {"temperature": 0}
    values: dict[str, Any] = {"target": target, "method": method, "max_tokens": 12, "device": "cpu"}
    values |= drafter_of(method, target, tmp_path)
    _, tokens = decoded(Recipe(**values, **sampling), PROMPT, pool)
    held: list[int] = []
    engine_run = CachedModel.score

    def recorded(self: CachedModel, *arguments: Any) -> Any:
        assert isinstance(self, UncachedModel)
        held.append(self._keep(*arguments)[0])
        return engine_run(self, *arguments)

    monkeypatch.setattr(CachedModel, "score", recorded)
    _, same = decoded(Recipe(**values, **sampling, use_cache=False), PROMPT, pool)
    assert same == tokens and held and not any(held)


@pytest.mark.parametrize("method", LOCAL_METHODS)
def test_caches_are_freed_without_a_garbage_collection(
    method: str, target: str, pool: ModelPool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a page accumulates those of many runs."""
    drafter = drafter_of(method, target, tmp_path)
    recipe = Recipe(target=target, method=method, max_tokens=12, device="cpu", **drafter)

    def caches() -> int:
        return sum(issubclass(type(one), (Cache, CachedHead)) for one in gc.get_objects())

    monkeypatch.setattr(gc, "collect", lambda: 0)
    counts = []
    gc.disable()
    try:
        for _ in range(3):
            decoded(recipe, PROMPT, pool, Stores(began=datetime.now()))
            counts.append(caches())
    finally:
        gc.enable()
    assert counts[1:] == counts[:1] * 2


def test_baselines_have_a_cache_and_services_need_it() -> None:
    assert baseline_of(Recipe(use_cache=False)).use_cache
    with pytest.raises(UserError, match="use_cache can be disabled for a local target only"):
        Recipe(use_cache=False, cloud=CloudConfig("http://127.0.0.1:1"))
