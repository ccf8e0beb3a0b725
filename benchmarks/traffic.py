"""What travels between edge and cloud: ``python -m benchmarks.traffic``. Two processes over loopback.

Bytes of a round by kind of draft, rule and encoding, HTTP and its headers included, against what the ids, scalars and
laws alone would take: four bytes an id, a scalar and (float32) a token of a row. No time is taken.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cloud import cloud, rounds
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import ENCODINGS, CloudConfig

KINDS: dict[str, tuple[dict[str, Any], str, int]] = {  # settings, how rows travel, bytes of a drafted token's q
    "point masses (T=0)": ({"temperature": 0.0}, "float32", 0),
    "coupled": ({"temperature": 1.0, "rule": "coupled"}, "float32", 0),
    "scalar q (lossy)": ({"temperature": 1.0}, "scalar", 4),
    "row of float32": ({"temperature": 1.0}, "float32", 4),
    "row of float16": ({"temperature": 1.0}, "float16", 4),
}
WIDTHS = {"float32": 4, "float16": 2, "scalar": 0}  # bytes of a row's entry


def traffic(base: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[dict[str, Any]]:
    """A record per kind of draft, rule and encoding: bytes of a round each way, and what theory has for them."""
    assert base.cloud is not None and base.drafter_spec is not None
    vocab_size = pool.take(base.drafter_spec).vocab_size
    for name, (settings, q_rows, q_bytes) in KINDS.items():
        for encoding in ENCODINGS:
            wire = replace(base.cloud, q_rows=q_rows, encoding=encoding)
            found = rounds(replace(base, **settings, gamma=4, cloud=wire), prompts, pool)
            rows = found.rows / found.count
            yield {
                "mode": name,
                "encoding": encoding,
                "k": found.gamma,
                "rows": rows,
                "theory_up": (4 + q_bytes) * found.gamma + rows * vocab_size * WIDTHS[q_rows],
                "theory_down": 8.0,
                "up": found.up / found.count,
                "down": found.down / found.count,
                "all_of_q": (4 + 4 * vocab_size) * found.gamma,
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and a JSON line."""
    parser = argparse.ArgumentParser(prog="benchmarks.traffic")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    pool, prompts, found = ModelPool(), load_prompts(kinds=["code"])[: options.prompts], []
    with cloud() as service:
        wire = CloudConfig(service.url, deadline_ms=5000)
        base = Recipe(temperature=0.0, top_p=1.0, max_tokens=options.max_tokens, cloud=wire)
        rounds(replace(base, max_tokens=8), prompts, pool)
        print("| draft and rule | encoding | k | rows/round | up, theory | up | down, theory | down | all of q up |")
        print("|---" * 9 + "|")
        for one in traffic(base, prompts, pool):
            found.append(one)
            print(
                f"| {one['mode']} | {one['encoding']} | {one['k']:.1f} | {one['rows']:.2f} | {one['theory_up']:,.0f} "
                f"| {one['up']:,.0f} | {one['theory_down']:.0f} | {one['down']:,.0f} | {one['all_of_q']:,.0f} |",
                flush=True,
            )
    print(json.dumps({"traffic": found}))


if __name__ == "__main__":
    main()
