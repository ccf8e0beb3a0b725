"""Nonsense for the service, made from its own description: ``python -m benchmarks.fuzz``.

The service runs in a process of its own. Schemathesis (``pip install schemathesis msgpack``, here or elsewhere:
``--fuzzer`` names its program) reads its description and sends it what that allows and what it forbids, in both
encodings. Every answer must come in time, be no 5xx, and be one that the description knows; the service's memory is
looked at meanwhile, and afterwards it must still write what plain decoding at hand writes.
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

from benchmarks.cloud import cloud
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig
from specdemo.remote.remote_model import TOKEN

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the fuzzer's own report, then what became of the service, and a JSON line; 1 where anything is amiss."""
    parser = argparse.ArgumentParser(prog="benchmarks.fuzz")
    parser.add_argument("--fuzzer", default="st", help="schemathesis' program")
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest-s", type=float, default=30.0, help="an answer that takes longer is a failure")
    options = parser.parse_args(arguments)
    if shutil.which(options.fuzzer) is None:
        raise UserError(
            f"there is no program {options.fuzzer}: pip install schemathesis msgpack, or name it with --fuzzer"
        )
    os.environ[TOKEN] = secrets.token_hex()
    pool, memory = ModelPool(), []
    with cloud("--contexts", "64", "--budget-mb", "64") as service, tempfile.TemporaryDirectory() as work:
        recipe = Recipe(temperature=0.0, max_tokens=48, cloud=CloudConfig(service.url, deadline_ms=5000))
        judged = [_judges(recipe, pool)]
        assert recipe.drafter_spec is not None
        command = [
            options.fuzzer,
            "run",
            f"{service.url}/openapi.json",
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
            "--report-har-path=said.json",
        ]
        vocabulary = str(pool.take(recipe.drafter_spec).vocab_size)
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS), "SPECDEMO_VOCABULARY": vocabulary}
        began = time.monotonic()
        with subprocess.Popen(command, cwd=work, env=environment) as fuzzer:
            while fuzzer.poll() is None:
                memory.append(service.rss_bytes)
                try:
                    fuzzer.wait(1.0)
                except subprocess.TimeoutExpired:
                    continue
        seconds = time.monotonic() - began
        answers = _answers(Path(work, "said.json"))
        judged.append(_judges(recipe, pool))
        memory.append(service.rss_bytes)
    figures = {
        "seconds": seconds,
        "fuzzer_found_nothing": fuzzer.returncode == 0,
        "answers": answers,
        "judges_before": judged[0],
        "judges_after": judged[1],
        **{f"rss_mb_at_{quarter}_quarters": memory[quarter * (len(memory) - 1) // 4] / 1e6 for quarter in range(5)},
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' ')}: {value:,.1f}" if isinstance(value, float) else f"{name}: {value}")
    print(json.dumps({"fuzz": figures}))
    return 0 if all(judged) and fuzzer.returncode == 0 else 1


def _answers(report: Path) -> dict[str, dict[str, int]]:
    """How often each status was answered, by method and the first two parts of the path."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in json.loads(report.read_text("utf-8"))["log"]["entries"]:
        path = "/".join(urlsplit(entry["request"]["url"]).path.split("/")[:3])
        found[f"{entry['request']['method']} {path}"][str(entry["response"]["status"])] += 1
    return {name: dict(sorted(counts.items())) for name, counts in sorted(found.items())}


def _judges(recipe: Recipe, pool: ModelPool) -> bool:
    """Whether the service's text is that of plain decoding at hand."""
    prompt = load_prompts(kinds=["code"])[0].text
    texts = [
        [token for event in generate(one, prompt, pool) if isinstance(event, StepEvent) for token in event.step.tokens]
        for one in (recipe, replace(recipe, method="ar", cloud=None))
    ]
    return texts[0] == texts[1]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as refusal:
        sys.exit(f"specdemo: {refusal}")
