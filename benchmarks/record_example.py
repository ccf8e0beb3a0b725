"""Record the runs that the page plays without a model, each with its AR baseline: the files of assets/traces.

`python -m benchmarks.record_example` records the example of the first visit, `--name` another recording; `--target`
replaces the target. A trace contains the name of the pair, no file names.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.runs import traced
from benchmarks.tables import Study, study_command
from specdemo.core.errors import UserError, check_name
from specdemo.core.trace import write
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS, PAIRS
from specdemo.option_rules import settings_of_pair
from specdemo.recipe import Recipe
from specdemo.ui.lane import baseline_of
from specdemo.ui.page import RECORDED_TOP

EXAMPLE = "hybrid, short answer"
STACK = 'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self, items=()):'
LINES = 'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a text file.'
_CODE: dict[str, Any] = {"pair": "bundled", "top_p": 1.0, "seed": 1, "max_tokens": 96, "gamma": 4}
# Title of an example, or a prompt, and options
RECORDINGS: dict[str, tuple[str, dict[str, Any]]] = {
    EXAMPLE: ("Rewrite a text", {"max_tokens": 80}),
    "draft, temperature 0.7": (STACK, {**_CODE, "method": "draft", "temperature": 0.7}),
    "tree, greedy": (LINES, {**_CODE, "method": "tree", "temperature": 0.0}),
}
WARM_UPS = 2


def recording(name: str, options: argparse.Namespace) -> tuple[Recipe, str]:
    """Return recipe and prompt of a recording; an example has the settings of its pair."""
    text, values = RECORDINGS[name]
    examples = {example["title"]: example for example in json.loads((ASSETS / "examples.json").read_text())["ready"]}
    if example := examples.get(text):
        own = {name: example[name] for name in ("method", "chat", "temperature")}
        values = {**settings_of_pair(PAIRS[example["pair"]], own), "pair": example["pair"], "top_p": 1.0, **values}
        text = example["prompt"]
    if options.target:
        values = {**values, "pair": None, "target": options.target}
    return replace(Recipe(), **values, top=RECORDED_TOP, device=options.device), text


def study(options: argparse.Namespace) -> None:
    """Write the trace of both lanes, after warm-up runs."""
    check_name("recording", options.name, RECORDINGS)
    recipe, prompt = recording(options.name, options)
    pool, lines = ModelPool(), []
    named = {"pair": recipe.pair, "target": None, "drafter": None}
    for lane in (recipe, baseline_of(recipe)):
        talk = [{"role": "user", "content": prompt}] if lane.chat else prompt
        *_, trace = (traced(lane, talk, pool) for _ in range(WARM_UPS + 1))
        header = replace(trace.header, recipe={**trace.header.recipe, **named})
        lines += [write(event) for event in (header, *trace.steps, trace.end)]
        m = trace.end.metrics
        print(f"{lane.method}: {m.tokens} tokens, {m.tokens_per_target_pass:.2f} per pass", end=", ")
        print(f"accepted {m.accepted} of {m.tested} tested, {m.tokens_per_second:.1f} tokens/s")
    text = "".join(lines)
    if str(Path.home()) in text or (options.target and options.target in text):
        raise UserError("the trace contains the name of a file: nothing was written")
    output = options.output or ASSETS / "traces" / f"{options.name}.jsonl"
    output.write_text(text, "utf-8")
    print(f"{output}: {len(text.encode()) / 1000:.0f} kB")


OPTIONS = {
    "name": {"default": EXAMPLE, "help": f"{', '.join(RECORDINGS)} (default: {EXAMPLE})"},
    "target": {"help": "GGUF file or directory of the target (default: that of the pair)"},
    "device": "cpu",
    "output": {"type": Path, "help": "file (default: the recording in assets/traces)"},
}
main = study_command(__file__, __doc__, {}, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
