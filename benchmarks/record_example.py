"""Record the trace that the page plays at the first visit: an example of assets/examples.json and its AR baseline.

`python -m benchmarks.record_example` needs the pair of the example; `--target FILE` records a model file instead. The
trace contains the name of the pair, no file names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.tables import ROOT, run_study, study_parser
from specdemo.core.errors import UserError, check_name
from specdemo.core.events import End, Event, Header, Loading
from specdemo.core.trace import write
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS, PAIRS
from specdemo.recipe import Recipe
from specdemo.ui.lane import baseline_of
from specdemo.ui.page import RECORDED_TOP

EXAMPLE = "Rewrite a text"
OUTPUT = ASSETS / "traces" / "nasd, short answer.jsonl"
WARM_UPS = 2


def recipe_of_example(example: dict[str, Any], options: argparse.Namespace) -> Recipe:
    """Return the recipe of an example, with the draft length of its pair unless given."""
    pair = PAIRS.get(example["pair"])
    gamma = options.gamma or (pair.gamma if pair else Recipe().gamma)
    models = {"target": options.target} if options.target else {"pair": example["pair"]}
    names = ("method", "chat", "temperature")
    return Recipe(
        **models,
        **{name: example[name] for name in names},
        gamma=gamma,
        top=RECORDED_TOP,
        max_tokens=options.max_tokens,
        device=options.device,
    )


def run(recipe: Recipe, prompt: str, pool: ModelPool) -> Iterator[Event]:
    """Yield the events of a run. Raises `UserError` if it fails."""
    talk: Any = [{"role": "user", "content": prompt}] if recipe.chat else prompt
    for event in generate(recipe, talk, pool, {}):
        if isinstance(event, End) and event.reason == "error":
            raise UserError(event.error or "the run failed")
        yield event


def study(options: argparse.Namespace) -> None:
    """Write the trace of both lanes, after warm-up runs."""
    ready = {
        example["title"]: example for example in json.loads((ASSETS / "examples.json").read_text("utf-8"))["ready"]
    }
    check_name("example", options.example, ready)
    example, pool, lines = ready[options.example], ModelPool(), []
    recipe = recipe_of_example(example, options)
    named = {"pair": example["pair"], "target": None, "drafter": None}
    for lane in (recipe, baseline_of(recipe)):
        for _ in range(WARM_UPS):
            for _ in run(lane, example["prompt"], pool):
                pass
        for event in run(lane, example["prompt"], pool):
            if isinstance(event, Header):
                event = replace(event, recipe={**event.recipe, **named})
            if isinstance(event, End):
                m = event.metrics
                print(f"{lane.method}: {m.tokens} tokens, {m.tokens_per_target_pass:.2f} per pass", end=", ")
                print(f"accepted {m.accepted} of {m.tested} tested, {m.tokens_per_second:.1f} tokens/s")
            if not isinstance(event, Loading):
                lines.append(write(event))
    text = "".join(lines)
    if str(Path.home()) in text or (options.target and options.target in text):
        raise UserError("the trace contains the name of a file: nothing was written")
    options.output.write_text(text, "utf-8")
    print(f"{options.output}: {len(text.encode()) / 1000:.0f} kB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and record the trace."""
    parser = study_parser(__file__, __doc__)
    parser.add_argument("--example", default=EXAMPLE, help=f"title of the example (default: {EXAMPLE})")
    parser.add_argument("--target", help="GGUF file or directory of the target (default: the pair of the example)")
    parser.add_argument("--gamma", type=int, help="draft length (default: of the pair)")
    parser.add_argument("--max-tokens", type=int, default=80, help="longest answer (default: 80)")
    parser.add_argument("--device", default="cpu", help="device (default: cpu)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"(default: {OUTPUT.relative_to(ROOT)})")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
