"""The edge alone, the cloud alone, and both: ``python -m benchmarks.modes``.

Every mode decodes the same prompts in a process of its own, so that its peaks of memory are its own; the cloud is one
more process. Speed-up is of the medians of the whole time, against the cloud alone (practice guide, section 9).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.cloud import cloud
from specdemo.core.events import StepEvent
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import MODES, CloudConfig


def one(
    mode: str, url: str, rtt_ms: float, temperature: float, gamma: int, count: int, max_tokens: int
) -> dict[str, Any]:
    """What a mode took on every prompt; the first prompt is run once before anything counts."""
    link = CloudConfig(url, mode=mode, encoding="msgpack", rtt_ms=rtt_ms, deadline_ms=5000)
    recipe = Recipe(temperature=temperature, top_p=1.0, gamma=gamma, max_tokens=max_tokens, cloud=link)
    pool, prompts = ModelPool(), load_prompts(kinds=["code"])[:count]
    runs = [list(generate(recipe, prompt.text, pool)) for prompt in (prompts[0], *prompts)][1:]
    steps = [[event for event in run if isinstance(event, StepEvent)] for run in runs]
    peaks = [run[-1].peak for run in runs]
    ends = [run[-1].metrics.as_dict() for run in runs]
    link_totals = [end.get("remote", {}) for end in ends]
    rounds = sum(map(len, steps))
    calls = sum(event.step.verdict.notes.get("escalated", 0.0) for run in steps for event in run)
    rss = max(peak.process for peak in peaks)
    kv = max(event.memory.kv for run in steps for event in run)
    return {
        "mode": mode,
        "ttft_s": [end["ttft_s"] for end in ends],
        "total_s": [run[-1].step.t for run in steps],
        "tokens": sum(end["tokens"] for end in ends),
        "tokens_per_second": sum(end["tokens"] for end in ends) / sum(run[-1].step.t for run in steps),
        "peak_rss_bytes": rss,
        "peak_device_bytes": peaks[-1].device,
        "kv_bytes": kv,
        "kv_share": kv / rss,
        "bytes_up": sum(total.get("bytes_up", 0.0) for total in link_totals),
        "bytes_down": sum(total.get("bytes_down", 0.0) for total in link_totals),
        "cloud_call_share": 1.0 if mode == "cloud_only" else calls / rounds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and a JSON line."""
    parser = argparse.ArgumentParser(prog="benchmarks.modes")
    parser.add_argument("--rtt-ms", type=float, default=30.0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--only", nargs=2, metavar=("MODE", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    settings = (options.rtt_ms, options.temperature, options.gamma, options.prompts, options.max_tokens)
    if options.only:
        print(json.dumps(one(*options.only, *settings)))
        return
    found = []
    with cloud() as service:
        for mode in MODES:
            flags = ("--rtt-ms", "--temperature", "--gamma", "--prompts", "--max-tokens")
            values = [part for pair in zip(flags, map(str, settings), strict=True) for part in pair]
            command = [sys.executable, "-m", "benchmarks.modes", *values, "--only", mode, service.url]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.append({**json.loads(said.splitlines()[-1]), "cloud_rss_bytes": service.rss_bytes})
    alone = _at(next(one for one in found if one["mode"] == "cloud_only")["total_s"], 0.5)
    print(
        "| mode | TTFT p50 / p95 ms | total p50 / p95 s | tokens/s | speed-up | edge peak MB | cloud MB | KV MB, share "
        "| up KB | down KB | cloud calls |\n" + "|---" * 11 + "|"
    )
    for one_mode in found:
        ttft, total = ([_at(one_mode[name], share) for share in (0.5, 0.95)] for name in ("ttft_s", "total_s"))
        print(
            f"| {one_mode['mode']} | {1000 * ttft[0]:.0f} / {1000 * ttft[1]:.0f} | {total[0]:.2f} / {total[1]:.2f} "
            f"| {one_mode['tokens_per_second']:.1f} | {alone / total[0]:.2f} | {one_mode['peak_rss_bytes'] / 1e6:.0f} "
            f"| {one_mode['cloud_rss_bytes'] / 1e6:.0f} | {one_mode['kv_bytes'] / 1e6:.2f}, {one_mode['kv_share']:.2%} "
            f"| {one_mode['bytes_up'] / 1e3:.1f} | {one_mode['bytes_down'] / 1e3:.1f} "
            f"| {one_mode['cloud_call_share']:.0%} |"
        )
    print(json.dumps({"modes": found}))


def _at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
