"""Fuzz the cloud service from its OpenAPI description: table `fuzz` in docs/edge-cloud.md.

`python -m benchmarks.fuzz --seconds 150 --seed 1 --write`. Requires Schemathesis (`pip install schemathesis msgpack`,
possibly in another environment named by `--fuzzer`), which sends valid and invalid requests in both encodings. Every
response must arrive in time, match the description and not be a 5xx; afterwards the service must still reproduce the
text of local AR decoding.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.runs import cloud_service, traced
from benchmarks.tables import publish, run_study, study_parser
from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.access import TOKEN
from specdemo.remote.config import CloudConfig

TABLES = {"fuzz": "docs/edge-cloud.md"}
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "ignored_auth",
    "unsupported_method",
)
HOOKS = Path(__file__).with_name("fuzz_hooks.py")
REPORT = "responses.json"
COLUMNS = {
    "requests": "{requests:,}",
    "accepted": "{status_2xx:,}",
    "rejected": "{status_4xx:,}",
    "5xx": "{status_5xx}",
    "fuzzer passed": "{fuzzer_passed}",
    "AR text before, after": "{correct_before}, {correct_after}",
    "memory before, 1/4, 1/2, end MB": "{rss_mb[0]:.0f}, {rss_mb[1]:.0f}, {rss_mb[2]:.0f}, {rss_mb[3]:.0f}",
}


def study(options: argparse.Namespace) -> int:
    """Run the fuzzer and publish the table. Return 1 after any failure."""
    if shutil.which(options.fuzzer) is None:
        raise UserError(f"{options.fuzzer} is missing: pip install schemathesis msgpack, or name it with --fuzzer")
    options.command = options.command.replace(f" --fuzzer {options.fuzzer}", "")
    os.environ[TOKEN] = secrets.token_hex()
    pool, memory = ModelPool(), []
    with cloud_service("--contexts", "64", "--budget-mb", "64") as service, tempfile.TemporaryDirectory() as work:
        recipe = Recipe(temperature=0.0, max_tokens=48, cloud=CloudConfig(service.url, deadline_ms=5000))
        assert recipe.drafter_spec is not None
        correct_before = _reproduces_ar_text(recipe, pool)
        vocabulary = str(pool.take(recipe.drafter_spec).vocab_size)
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS), "SPECDEMO_VOCABULARY": vocabulary}
        began = time.monotonic()
        with subprocess.Popen(_command(options, service.url), cwd=work, env=environment) as fuzzer:
            while fuzzer.poll() is None:
                memory.append(service.rss_bytes)
                try:
                    fuzzer.wait(1.0)
                except subprocess.TimeoutExpired:
                    continue
        seconds = time.monotonic() - began
        responses = _count_responses(Path(work, REPORT))
        correct_after = _reproduces_ar_text(recipe, pool)
        memory.append(service.rss_bytes)
    statuses = [(status, count) for counts in responses.values() for status, count in counts.items()]
    figures = {
        "seconds": seconds,
        "requests": sum(count for _, count in statuses),
        **{f"status_{digit}xx": sum(n for status, n in statuses if status[0] == digit) for digit in "245"},
        "fuzzer_passed": fuzzer.returncode == 0,
        "responses": responses,
        "correct_before": correct_before,
        "correct_after": correct_after,
        "rss_mb": [memory[quarter * (len(memory) - 1) // 4] / 1e6 for quarter in (0, 1, 2, 4)],
    }
    publish(options, "fuzz", COLUMNS, [figures])
    return 0 if correct_before and correct_after and fuzzer.returncode == 0 else 1


def _command(options: argparse.Namespace, url: str) -> list[str]:
    return [
        options.fuzzer,
        "run",
        f"{url}/openapi.json",
        f"--header=Authorization: Bearer {os.environ[TOKEN]}",
        "--phases=coverage,fuzzing",
        f"--checks={','.join(CHECKS)}",
        f"--max-time={options.seconds}",
        f"--request-timeout={options.longest_s}",
        f"--seed={options.seed}",
        "--continue-on-failure",
        "--suppress-health-check=all",
        "--generation-database=none",
        "--no-color",
        "--report=har",
        f"--report-har-path={REPORT}",
    ]


def _count_responses(report: Path) -> dict[str, dict[str, int]]:
    """Count responses by method, first two parts of the path, and status."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in json.loads(report.read_text("utf-8"))["log"]["entries"]:
        path = "/".join(urlsplit(entry["request"]["url"]).path.split("/")[:3])
        counts[f"{entry['request']['method']} {path}"][str(entry["response"]["status"])] += 1
    return {name: dict(sorted(statuses.items())) for name, statuses in sorted(counts.items())}


def _reproduces_ar_text(recipe: Recipe, pool: ModelPool) -> bool:
    prompt = load_prompts(kinds=["code"])[0].text
    local = replace(recipe, method="ar", cloud=None)
    return traced(recipe, prompt, pool).tokens == traced(local, prompt, pool).tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--fuzzer", default="st", help="program of Schemathesis (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest-s", type=float, default=30.0, help="time limit of a response, in seconds")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
