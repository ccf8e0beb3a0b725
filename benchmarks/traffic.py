"""Bytes per edge-cloud step by draft, rule and encoding: table `traffic` in docs/edge-cloud.md.

`python -m benchmarks.traffic --write`. Two processes over loopback; HTTP headers are included. In theory an id takes
four bytes, a scalar four, and an entry of a float32 row four. No time is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.runs import cloud_service, step_totals
from benchmarks.tables import publish, run_study, study_parser
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import ENCODINGS, CloudConfig

TABLES = {"traffic": "docs/edge-cloud.md"}
KINDS: dict[str, tuple[dict[str, Any], str, int]] = {  # settings, encoding of rows, bytes of q per draft token
    "point masses (T=0)": ({"temperature": 0.0}, "float32", 0),
    "coupled": ({"temperature": 1.0, "rule": "coupled"}, "float32", 0),
    "scalar q (lossy)": ({"temperature": 1.0}, "scalar", 4),
    "row of float32": ({"temperature": 1.0}, "float32", 4),
    "row of float16": ({"temperature": 1.0}, "float16", 4),
}
ENTRY_BYTES = {"float32": 4, "float16": 2, "scalar": 0}
COLUMNS = {
    "draft and rule": "{mode}",
    "encoding": "{encoding}",
    "k": "{k:.1f}",
    "rows/step": "{rows:.2f}",
    "up, theory": "{theory_up:,.0f}",
    "up": "{up:,.0f}",
    "down, theory": "{theory_down:.0f}",
    "down": "{down:,.0f}",
    "all of q up": "{all_of_q:,.0f}",
}


def traffic(base: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[dict[str, Any]]:
    """Yield measured and theoretical bytes per step for every kind of draft and every encoding."""
    assert base.cloud is not None and base.drafter_spec is not None
    vocab_size = pool.take(base.drafter_spec).vocab_size
    for name, (settings, q_rows, q_bytes) in KINDS.items():
        for encoding in ENCODINGS:
            link = replace(base.cloud, q_rows=q_rows, encoding=encoding)
            totals = step_totals(replace(base, **settings, gamma=4, cloud=link), prompts, pool)
            rows = totals.rows / totals.steps
            yield {
                "mode": name,
                "encoding": encoding,
                "k": totals.gamma,
                "rows": rows,
                "theory_up": (4 + q_bytes) * totals.gamma + rows * vocab_size * ENTRY_BYTES[q_rows],
                "theory_down": 8.0,
                "up": totals.bytes_up / totals.steps,
                "down": totals.bytes_down / totals.steps,
                "all_of_q": (4 + 4 * vocab_size) * totals.gamma,
            }


def study(options: argparse.Namespace) -> None:
    """Measure and publish the table."""
    pool, prompts = ModelPool(), load_prompts(kinds=["code"])[: options.prompts]
    with cloud_service() as service:
        link = CloudConfig(service.url, deadline_ms=5000)
        base = Recipe(temperature=0.0, top_p=1.0, max_tokens=options.max_tokens, cloud=link)
        publish(options, "traffic", COLUMNS, list(traffic(base, prompts, pool)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
