"""Edge-cloud decoding: tables `gates` and `modes` in docs/edge-cloud.md.

`OMP_NUM_THREADS=1 python -m benchmarks.edge_cloud STUDY --write`. `modes` runs edge and cloud as two processes
over loopback.

`gates`: thresholds are percentiles of each signal over the draft tokens of half of the prompts (the practice guide
uses the 80th of the NLL); figures are measured on the other half. Saved calls are relative to verifying every draft.
Agreement is the share of tokens that are the target's first choice; beta is the mean of sum min(p, q), 1 for tokens
verified by the target.

`modes`: every mode decodes the same prompts in a new process, to separate the memory peaks. The speed-up is the ratio
of the median total times, relative to `cloud_only` (practice guide, section 9).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.runs import cloud_service, in_new_process, traced
from benchmarks.tables import Study, publish, study_command
from specdemo.bench.calibration import SignalRecorder
from specdemo.core.decode import decode
from specdemo.core.metrics import percentile
from specdemo.core.step import Step
from specdemo.models.engines.llama_weights import with_dropout
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import build_pipeline
from specdemo.plan import plan_run
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import MODES, CloudConfig
from specdemo.remote.gates import PASSES, GatedVerifier, RecordingPolicy, mc_dropout

TABLES = dict.fromkeys(("gates", "modes"), "docs/edge-cloud.md")

PERCENTILES = (40, 80, 95)
SIGNAL_NAMES = ("nll", "entropy", "margin", "variance")
GATE_COLUMNS = {
    "signal": "{signal}",
    "percentile": "{percentile}",
    "threshold": "{threshold:.4g}",
    "calls saved": "{saved:.0%}",
    "agreement": "{agreement:.3f}",
    "mean beta": "{beta:.3f}",
}
MODE_COLUMNS = {
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
    "cloud steps": "{cloud_call_share:.0%}",
}


class GateStudy:
    """Decoding with the bundled pair and a gate."""

    def __init__(self, recipe: Recipe, pool: ModelPool, max_hard_share: float) -> None:
        plan = plan_run(recipe)
        assert plan.drafter is not None
        self._recipe, self._max_hard_share = recipe, max_hard_share
        self._target, self._drafter = pool.get(plan.target), pool.get(plan.drafter)
        variants = [with_dropout(self._drafter.model, seed) for seed in range(PASSES)]
        self._variance = mc_dropout([CachedModel(model).score for model in variants])

    def run(self, text: str, thresholds: Mapping[str, float]) -> tuple[list[int], list[Step], SignalRecorder]:
        """Return the prompt's tokens, the steps, and the target with the recorded signals."""
        pipeline = build_pipeline(plan_run(self._recipe), self._target, self._drafter)
        policy = RecordingPolicy(pipeline.policy)
        target = SignalRecorder(pipeline.verifier, policy, self._variance)
        variance = self._variance if "variance" in thresholds else None
        verifier = GatedVerifier(target, policy, thresholds, self._max_hard_share, variance=variance)
        tokens = self._target.tokenizer.encode(text)
        limits = {
            "max_tokens": min(self._recipe.max_tokens, pipeline.context - len(tokens)),
            "stop": self._target.stop,
            "clock": lambda: 0.0,
        }
        return tokens, list(decode(tokens, verifier, pipeline.drafter, policy, **limits)), target

    def calibrate(self, prompts: Sequence[Prompt]) -> dict[str, list[float]]:
        """Return the values of each signal over all draft tokens when every draft is verified."""
        values: dict[str, list[float]] = {name: [] for name in SIGNAL_NAMES}
        for prompt in prompts:
            _, _, target = self.run(prompt.text, {"nll": -1.0})
            for name in values:
                values[name] += target.signals[name]
        return values

    def measure(self, prompts: Sequence[Prompt], thresholds: Mapping[str, float]) -> tuple[float, float, float]:
        """Return calls per token, agreement and mean beta."""
        calls = tokens = 0
        agreement: list[float] = []
        betas: list[float] = []
        for prompt in prompts:
            prompt_tokens, steps, _ = self.run(prompt.text, thresholds)
            new = [token for step in steps for token in step.tokens]
            escalated = [not step.unverified for step in steps]
            verified = [flag for flag, step in zip(escalated, steps, strict=True) for _ in step.tokens]
            p, q = (
                _distributions(model, [*prompt_tokens, *new])[len(prompt_tokens) - 1 : -1]
                for model in (self._target, self._drafter)
            )
            agreement += (p.argmax(-1) == torch.tensor(new)).float().tolist()
            overlap = torch.minimum(p, q).sum(-1).tolist()
            betas += [1.0 if by_target else beta for by_target, beta in zip(verified, overlap, strict=True)]
            calls += sum(escalated[1:])
            tokens += len(new)
        return calls / tokens, statistics.mean(agreement), statistics.mean(betas)


def _distributions(model: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    return CachedModel(model.model).read(tokens).float().softmax(-1).cpu()


def gate_curve(gate: GateStudy, calibration: Sequence[Prompt], held_out: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
    """Yield a record per signal and percentile, and for the limits of always and never calling the target."""
    values = gate.calibrate(calibration)
    points = [("verify always", 0, {"nll": -1.0})]
    for name in SIGNAL_NAMES:
        for percent in PERCENTILES:
            share = (100 - percent if name == "margin" else percent) / 100
            points.append((name, percent, {name: percentile(values[name], share)}))
    points.append(("verify never", 100, {"nll": float("inf")}))
    always = 0.0
    for name, percent, thresholds in points:
        calls, agreement, beta = gate.measure(held_out, thresholds)
        always = always or calls  # of the first point
        threshold = thresholds.get(name, 0.0)
        figures = {"saved": 1 - calls / always, "agreement": agreement, "beta": beta}
        yield {"signal": name, "percentile": percent, "threshold": threshold, **figures}


def gates(options: argparse.Namespace) -> None:
    """Measure saved cloud calls and lost quality by threshold of a gate."""
    settings = {name: getattr(options, name) for name in ("temperature", "gamma", "max_tokens")}
    recipe = Recipe(**settings, top_p=1.0, device="cpu")
    prompts = load_prompts(kinds=["code"])[: options.prompts]
    gate = GateStudy(recipe, ModelPool(), options.ratio)
    publish(options, "gates", GATE_COLUMNS, list(gate_curve(gate, prompts[::2], prompts[1::2])))


def mode_figures(mode: str, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Decode all prompts in `mode`, after a warm-up run of the first, and return the figures."""
    cloud = CloudConfig(url, mode=mode, encoding="msgpack", rtt_ms=options.rtt_ms, deadline_ms=5000)
    recipe = Recipe(
        temperature=options.temperature, top_p=1.0, gamma=options.gamma, max_tokens=options.max_tokens, cloud=cloud
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


def modes(options: argparse.Namespace) -> None:
    """Compare edge only, cloud only and speculative decoding, each in a process."""
    records = []
    with cloud_service() as service:
        for mode in MODES:
            figures = in_new_process(mode_figures, mode, service.url, options)
            records.append({**figures, "cloud_mb": service.process.memory_info().rss / 1e6})
    baseline_s = next(record["total_p_s"][0] for record in records if record["mode"] == "cloud_only")
    publish(options, "modes", MODE_COLUMNS, [{**r, "speedup": baseline_s / r["total_p_s"][0]} for r in records])


STUDIES = {
    "gates": Study(
        gates,
        {"temperature": 0.0, "gamma": 4, "max_tokens": 32}
        | {"ratio": {"type": float, "default": 0.3, "help": "share of hard tokens that requires a call"}}
        | {"prompts": {"type": int, "default": 12, "help": "prompts of class code, half for calibration"}},
    ),
    "modes": Study(modes, {"rtt_ms": 30.0, "temperature": 0.0, "gamma": 4, "prompts": 6, "max_tokens": 64}),
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
