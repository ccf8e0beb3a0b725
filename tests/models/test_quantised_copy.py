"""Drafter `same`: the target in int8 or 4 bits, on the target's keys and values."""

import random
from typing import Any

import pytest
import torch
from fakes.native_models import text, weights
from fakes.traces import run_of, trace_lines

from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.generate import load_pair
from specdemo.models.engines.engine import Entry
from specdemo.models.engines.native import NativeCache, NativeEngine
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import SAME
from specdemo.models.zoo import PAIRS
from specdemo.native.interface import TextStruct
from specdemo.recipe import Recipe, plan_run

pytestmark = pytest.mark.long

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
BUNDLED = PAIRS["bundled"]
POOL = ModelPool()


def tokens(**values: Any) -> tuple[list[int], dict[str, Any]]:
    """Token ids and metrics of a run."""
    common = {"max_tokens": 32, "top_p": 1.0, "temperature": 0, "device": "cpu"}
    return run_of(Recipe(**{**common, **values}), PROMPT, POOL)


TREE, HYBRID, SVIP = {"method": "tree"}, {"method": "hybrid"}, {"first_target": False, "policy": "svip"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "changed", "variants"),
    [
        ("int8", {}, ({}, TREE, HYBRID, SVIP)),
        ("nf4", {"quantization": "bf16"}, ({}, TREE)),  # another number format than that of the copy's cache
        ("nf4", {"temperature": 0.7, "rule": "coupled"}, ({}, TREE, HYBRID)),
    ],
)
def test_text_is_that_of_the_target(form: str, changed: dict[str, Any], variants: tuple[dict[str, Any], ...]) -> None:
    """Greedy, or coupled."""
    expected, _ = tokens(pair="bundled", method="ar", **changed)
    for variant in variants:
        found, metrics = tokens(pair="bundled", drafter=SAME, drafter_quantization=form, **changed, **variant)
        assert found == expected and metrics["accepted"] > 0


@pytest.mark.parametrize("form", ["bfloat16", "nf4"])
def test_target_and_copy_do_not_disturb_each_other(form: str) -> None:
    """The target computes logits and hidden states of a fresh cache; with equal weights its copy does too."""
    model, rng = weights("llama", "bfloat16"), random.Random(0)
    target = CachedModel(model, taps=(0, 1, 2))
    copy = CachedModel(model if form == "bfloat16" else weights("llama", form), cache_owner=target)

    def draft(longest: int) -> Draft:
        count = rng.randrange(longest + 1)
        return Draft(tuple(rng.randrange(5) for _ in range(count)), tuple(rng.randrange(-1, i) for i in range(count)))

    written = text(20)
    for turn in range(60):
        for cached in [target, copy, copy][rng.randrange(3) :]:
            nodes = draft(5)
            logits = cached.score(written, nodes)
            if cached.model is model:
                fresh = CachedModel(model, taps=(0, 1, 2))
                assert torch.equal(logits, fresh.score(written, nodes))
                path = [*written, *(nodes.tokens[node] for node in nodes.path(len(nodes) - 1))]
                found, expected = cached.states(path, 0), fresh.states(path, 0)
                assert found is not None and expected is not None and torch.equal(found, expected)
        if turn % 2:
            path = copy.extend(written, 2, lambda logits, i: logits.argmax(-1))
            assert target.extend(written, 2, lambda logits, i: logits.argmax(-1)) == path or form != "bfloat16"
        kept = len(written) - rng.randrange(6) if turn % 7 == 6 else len(written)
        written = [*written[:kept], *(rng.randrange(5) for _ in range(1 + rng.randrange(3)))]
    assert target.kv_bytes > 0 and copy.kv_bytes == 0


@pytest.mark.slow
def test_the_prompt_is_processed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = NativeCache.describe_inputs

    def counted(self: NativeCache, text: TextStruct) -> None:
        rows.append(text.rows)
        original(self, text)

    tokens(pair="bundled", drafter=SAME)  # loads and measures
    monkeypatch.setattr(NativeCache, "describe_inputs", counted)
    tokens(pair="bundled", drafter=SAME, gamma=3)
    prompt = load(plan_run(Recipe(device="cpu")).target).tokenizer.encode(PROMPT)
    assert rows[0] == len(prompt) and max(rows[1:]) == 4 and rows[1] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("torch_engine")
def test_engines_of_torch_keep_two_caches(target: str) -> None:
    recipe = Recipe(target=target, drafter=SAME, temperature=0, max_tokens=12, device="cpu")
    assert run_of(recipe, "abcd", ModelPool())[1]["accepted"] > 0


@pytest.mark.slow
def test_the_library_loads_the_copy() -> None:
    pair = load_pair("bundled", SAME, device="cpu")
    for recipe in (Recipe(max_tokens=4), Recipe(drafter=SAME, max_tokens=4)):
        header = next(line for line in trace_lines(recipe, PROMPT, pair) if "recipe" in line)
        assert header["recipe"]["drafter"] == SAME and header["recipe"]["drafter_quantization"] == "int8"
    with pytest.raises(UserError, match="not smaller than the target in int8"):
        load_pair(BUNDLED.target, SAME, quantization="int8", device="cpu")


def test_a_copy_shares_no_pass_with_texts_in_another_number_format() -> None:
    """The copy writes float32 into the cache of its target, and float16 into caches of its own."""
    target, copy = NativeEngine(weights("llama", "float32")), NativeEngine(weights("llama", "int8"))

    def entries() -> list[Entry[NativeCache]]:
        engines = (target, copy, copy, target, copy)
        return [Entry(engine.new_cache(), text(30 + n, n), 0, Draft()) for n, engine in enumerate(engines)]

    alone = [copy.run([entry])[0] for entry in entries()]
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (1, 2, 0, 4, 3)):
        made = entries()
        together = copy.run([made[n] for n in order])
        assert all(torch.equal(logits, alone[n]) for logits, n in zip(together, order, strict=True))
