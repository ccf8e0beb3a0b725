"""Selection of recipes and prompts in the Bench tab, bounded in size."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import gradio as gr

from specdemo.bench.measure import grid
from specdemo.core.errors import UserError
from specdemo.core.policies import POLICIES
from specdemo.drafters import METHODS
from specdemo.prompts import Prompt, alternate_classes, load_prompts
from specdemo.recipe import Recipe
from specdemo.ui.controls import Controls
from specdemo.ui.frames import Run
from specdemo.ui.method_names import method_name
from specdemo.ui.tabs.sweep import Sweep

MOST_RUNS, MOST_TOKENS = 240, 24_000
_DRAFTING = [(method_name(name), name) for name, method in METHODS.items() if method.drafts]
_TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0)


def sweep(make: Callable[[dict[str, Any]], Recipe], latest: Run | None, **chosen: Any) -> Sweep:
    """Convert values from the browser. Raises `UserError` if they are invalid or exceed the page's limits.

    `make` converts settings of `bench.grid` to a recipe; `chosen`: arguments of `selected`.
    """
    varied, prompts = selected(**chosen)
    return within_limits(Sweep(tuple(map(make, varied)), prompts), latest)


def selected(
    *,
    methods: Any,
    gammas: Any,
    policies: Any,
    temperatures: Any,
    kinds: Any,
    each: Any,
    external: Any = None,
) -> tuple[list[dict[str, Any]], tuple[Prompt, ...]]:
    """Return settings of `bench.grid` and prompts. Raises `UserError` for invalid values.

    `each`: prompts per class, which alternate; `external`: servers of other engines, separated by spaces.
    """
    lists = {
        "method": methods,
        "draft length": gammas,
        "draft-length policy": policies,
        "temperature": temperatures,
        "class of prompts": kinds,
    }
    for name, chosen in lists.items():
        if not isinstance(chosen, list) or not chosen:
            raise UserError(f"choose at least one {name}")
    if isinstance(each, bool) or not isinstance(each, int) or each < 1:
        raise UserError(f"prompts per class must be an integer from 1, not {each!r}")
    servers = str(external or "").split()
    varied = list(islice(grid(methods, gammas, policies, temperatures, servers), MOST_RUNS + 1))
    if len(varied) > MOST_RUNS:
        raise UserError(f"that is more than {MOST_RUNS} recipes: choose fewer draft lengths, policies or temperatures")
    return varied, tuple(alternate_classes((prompt for kind in kinds for prompt in load_prompts([str(kind)])), each))


def within_limits(result: Sweep, latest: Run | None) -> Sweep:
    if result.runs > MOST_RUNS or result.tokens > MOST_TOKENS:
        raise UserError(
            f"{result.describe(latest)}: the page measures at most {MOST_RUNS} runs and {MOST_TOKENS:,} "
            "tokens. Reduce the selection, or use the terminal's bench"
        )
    return result


def grid_controls(kinds: list[str], defaults: Recipe, max_gamma: int | None) -> Controls:
    """Lay out the selection with draft lengths up to `max_gamma`."""

    def group(choices: list[Any], value: list[Any], label: str, name: str) -> gr.CheckboxGroup:
        return gr.CheckboxGroup(choices, value=value, label=label, min_width=280, elem_id=f"bench-{name}")

    selection: Controls = {}
    with gr.Row():
        methods = ["nasd", "suffix"] if defaults.chat else ["draft", "nasd"]
        fitting = list(dict.fromkeys(prompt.kind for prompt in load_prompts(chat=defaults.chat)))
        selection["methods"] = group(_DRAFTING, methods, "Methods (compared with the baseline)", "methods")
        selection["kinds"] = group(kinds, fitting, "Classes of prompts", "kinds")
    lengths = list(range(1, min(8, max_gamma or 8) + 1))
    with gr.Row():
        selection["policies"] = group(list(POLICIES), ["fixed"], "Draft-length policies", "policies")
        selection["gammas"] = group(lengths, [defaults.gamma], "Draft lengths γ (tokens)", "gammas")
    with gr.Row():
        temperatures = [(f"{t:g}", t) for t in _TEMPERATURES]
        selection["temperatures"] = group(temperatures, [0.0], "Temperatures", "temperatures")
        selection["each"] = gr.Slider(1, 24, 3, step=1, label="Prompts per class", min_width=200, elem_id="bench-each")
        selection["max_tokens"] = gr.Slider(
            8, 256, 64, step=8, label="Tokens per run", min_width=200, elem_id="bench-max-tokens"
        )
    return selection
