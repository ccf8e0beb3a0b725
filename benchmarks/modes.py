"""Edge only, cloud only and speculative decoding: table `modes` in docs/edge-cloud.md.

`OMP_NUM_THREADS=1 python -m benchmarks.modes --write`. Every mode decodes the same prompts
in a new process, to separate the memory peaks; the cloud is another process. The speed-up is the ratio of the median
total times, relative to `cloud_only` (practice guide, section 9).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.runs import cloud_service, percentile, run_module, traced
from benchmarks.tables import publish, run_study, study_parser
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import MODES, CloudConfig

TABLES = {"modes": "docs/edge-cloud.md"}
COLUMNS = {
    "mode": "{mode}",
    "TTFT p50 / p95 ms": "{ttft_ms[0]:.0f} / {ttft_ms[1]:.0f}",
    "total p50 / p95 s": "{total_p_s[0]:.2f} / {total_p_s[1]:.2f}",
    "tokens/s": "{tokens_per_second:.1f}",
    "speed-up": "{speedup:.2f}",
    "edge peak MB": "{edge_mb:.0f}",
    "cloud MB": "{cloud_mb:.0f}",
    "KV MB, share": "{kv_mb:.2f}, {kv_share:.2%}",
    "up KB": "{up_kb:.1f}",
    "down KB": "{down_kb:.1f}",
    "cloud calls": "{cloud_call_share:.0%}",
}


def measure(mode: str, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Decode all prompts in `mode`, after a warm-up run of the first, and return the figures."""
    link = CloudConfig(url, mode=mode, encoding="msgpack", rtt_ms=options.rtt_ms, deadline_ms=5000)
    recipe = Recipe(
        temperature=options.temperature, top_p=1.0, gamma=options.gamma, max_tokens=options.max_tokens, cloud=link
    )
    pool, prompts = ModelPool(), load_prompts(kinds=["code"])[: options.prompts]
    runs = [traced(recipe, prompt.text, pool) for prompt in (prompts[0], *prompts)][1:]
    steps = [event for run in runs for event in run.steps]
    links = [run.metrics.get("remote", {}) for run in runs]
    total_s = [run.steps[-1].step.t for run in runs]
    calls = sum(event.step.verdict.remote.get("escalated", 0.0) for event in steps)
    peak = max(run.metrics["peak_rss_bytes"] for run in runs)
    kv = max(event.memory.kv or 0.0 for event in steps)
    return {
        "mode": mode,
        "ttft_ms": [percentile([1000 * run.metrics["ttft_s"] for run in runs], share) for share in (0.5, 0.95)],
        "total_s": total_s,
        "total_p_s": [percentile(total_s, share) for share in (0.5, 0.95)],
        "tokens_per_second": sum(run.metrics["tokens"] for run in runs) / sum(total_s),
        "edge_mb": peak / 1e6,
        "kv_mb": kv / 1e6,
        "kv_share": kv / peak,
        "up_kb": sum(link.get("bytes_up", 0.0) for link in links) / 1e3,
        "down_kb": sum(link.get("bytes_down", 0.0) for link in links) / 1e3,
        "cloud_call_share": 1.0 if mode == "cloud_only" else calls / len(steps),
    }


def study(options: argparse.Namespace) -> None:
    """Start a process per mode and publish the table."""
    if options.only:
        print(json.dumps(measure(*options.only, options)))
        return
    settings = []
    for name in ("rtt_ms", "temperature", "gamma", "prompts", "max_tokens"):
        settings += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    records = []
    with cloud_service() as service:
        for mode in MODES:
            figures = json.loads(run_module("benchmarks.modes", *settings, "--only", mode, service.url))
            records.append({**figures, "cloud_mb": service.rss_bytes / 1e6})
    baseline_s = next(record["total_p_s"][0] for record in records if record["mode"] == "cloud_only")
    publish(options, "modes", COLUMNS, [{**r, "speedup": baseline_s / r["total_p_s"][0]} for r in records])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--rtt-ms", type=float, default=30.0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--only", nargs=2, metavar=("MODE", "URL"), help=argparse.SUPPRESS)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
