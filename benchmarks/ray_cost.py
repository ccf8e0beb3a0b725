"""Added latency and memory of Ray Serve (docs/hosting.md).

`OMP_NUM_THREADS=1 python -m benchmarks.ray_cost --write`. An edge verifies the same drafts with a service and with a
replica behind Ray Serve, alternately; the latency of a step excludes the time in the service.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil

from benchmarks.runs import cloud_service, traced
from benchmarks.tables import ROOT, publish, run_study, study_parser
from specdemo.core.metrics import percentile
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

TABLES = {"ray-cost": "docs/hosting.md"}
COLUMNS = {
    "service": "{service}",
    "steps": "{steps:,}",
    "link of a step p50 / p95 ms": "{p50_ms:.1f} / {p95_ms:.1f}",
    "paired difference, median ms": "{added_ms:+.1f}",
    "MB of all processes": "{megabytes:,.0f}",
}


@contextmanager
def ray_service() -> Iterator[tuple[str, psutil.Process]]:
    """Run a replica behind Ray Serve; yield its address and the process of the command."""
    command = [sys.executable, "-m", "specdemo", "serve", "--ray", "--pair", "bundled", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = dict(process.stdout.readline().rsplit(" ", 1) for _ in range(2))
            yield lines["listening on"].strip(), psutil.Process(process.pid)
        finally:
            process.terminate()


def unique_megabytes(process: psutil.Process) -> float:
    """Return the memory of a process and its descendants; pages that they share count once."""
    return sum(one.memory_full_info().pss for one in (process, *process.children(recursive=True))) / 1e6


def study(options: argparse.Namespace) -> None:
    """Alternate between both services."""
    pool, prompts = ModelPool(), load_prompts()[:: options.every]
    recipe = Recipe(method="lookup", temperature=0.0, max_tokens=48)
    link_ms: dict[str, list[float]] = {"serve": [], "serve --ray": []}
    with cloud_service() as plain, ray_service() as (url, process):
        urls = dict(zip(link_ms, (plain.url, url), strict=True))
        recipes = {name: replace(recipe, cloud=CloudConfig(address)) for name, address in urls.items()}
        for name in urls:
            traced(recipes[name], prompts[0].text, pool)  # compiles and connects
        for number, prompt in enumerate(prompts):
            for name in sorted(urls, reverse=bool(number % 2)):
                steps = [event.step for event in traced(recipes[name], prompt.text, pool).steps[1:]]
                link_ms[name] += [1000 * (step.seconds.verify - step.verdict.remote["cloud_s"]) for step in steps]
        megabytes = {"serve": unique_megabytes(plain.process), "serve --ray": unique_megabytes(process)}
    plain_ms, *_ = link_ms.values()
    records = [
        {
            "service": name,
            "steps": len(times),
            "p50_ms": percentile(times, 0.5),
            "p95_ms": percentile(times, 0.95),
            "added_ms": statistics.median(a - b for a, b in zip(times, plain_ms, strict=True)),
            "megabytes": megabytes[name],
        }
        for name, times in link_ms.items()
    ]
    publish(options, "ray-cost", COLUMNS, records)


def main(arguments: list[str] | None = None) -> int:
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--every", type=int, default=12, help="use every Nth prompt (default: %(default)s)")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
