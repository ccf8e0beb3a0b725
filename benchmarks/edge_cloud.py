"""Edge-cloud decoding: tables `gates`, `link`, `modes` and `traffic` in docs/edge-cloud.md.

`OMP_NUM_THREADS=1 python -m benchmarks.edge_cloud STUDY --write`. Edge and cloud are two processes over loopback,
except for `gates`.

`gates`: thresholds are percentiles of each signal over the draft tokens of half of the prompts (the practice guide
uses the 80th of the NLL); figures are measured on the other half. Saved calls are relative to verifying every draft.
Agreement is the share of tokens that are the target's first choice; beta is the mean of sum min(p, q), 1 for tokens
verified by the target.

`link`: a step takes gamma draft tokens, a target pass, an RTT and the overhead of HTTP and two Python processes:
S_net = E[tokens] / (v + gamma c + r + o) AR steps, r = RTT / T_target. All terms but r are measured without a delay,
with the same idle time between steps as on the link, because an idle processor starts slowly. The two runs of a pair
alternate; times are medians over the pairs.

`modes`: every mode decodes the same prompts in a new process, to separate the memory peaks. The speed-up is the ratio
of the median total times, relative to `cloud_only` (practice guide, section 9).

`traffic`: HTTP headers are included. In theory an id takes four bytes, a scalar four, and an entry of a float32 row
four. No time is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.runs import StepTotals, cloud_service, in_new_process, step_totals, traced
from benchmarks.tables import Study, publish, study_command
from specdemo.bench.calibration import SignalRecorder
from specdemo.core.decode import decode
from specdemo.core.metrics import percentile
from specdemo.core.step import Step
from specdemo.core.theory import best_gamma, expected_tokens
from specdemo.models.engines.llama_weights import with_dropout
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.pipeline import build_pipeline
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.config import ENCODINGS, MODES, CloudConfig
from specdemo.remote.gates import PASSES, GatedVerifier, RecordingPolicy, mc_dropout

TABLES = dict.fromkeys(("gates", "link", "modes", "traffic"), "docs/edge-cloud.md")

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
RTTS_MS = [0.0, 30.0, 100.0]
LENGTHS: tuple[int | str, ...] = (2, 4, 8, "dynamic", "closed form")
DYNAMIC = {"policy": "dynamic", "gamma": 6}  # initial length of the practice guide
LINK_COLUMNS = {
    "RTT ms": "{rtt_ms:.0f}",
    "length": "{length}",
    "gamma": "{gamma:.1f}",
    "mean overlap": "{alpha:.2f}",
    "tokens/step": "{tokens_per_step:.2f}",
    "step without RTT, ms": "{step_ms:.1f}",
    "S_net": "{s_net:.1f}",
    "measured": "{measured:.1f}",
    "measured / S_net": "{ratio:.2f}",
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
DRAFT_KINDS: dict[str, tuple[dict[str, Any], str, int]] = {  # settings, encoding of rows, bytes of q per draft token
    "point masses (T=0)": ({"temperature": 0.0}, "float32", 0),
    "coupled": ({"temperature": 1.0, "rule": "coupled"}, "float32", 0),
    "scalar q (lossy)": ({"temperature": 1.0}, "scalar", 4),
    "row of float32": ({"temperature": 1.0}, "float32", 4),
    "row of float16": ({"temperature": 1.0}, "float16", 4),
}
ENTRY_BYTES = {"float32": 4, "float16": 2, "scalar": 0}
TRAFFIC_COLUMNS = {
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


@dataclass
class LinkRuns:
    """Runs for an RTT and draft length, without and with the emulated delay."""

    rtt_s: float
    local: list[StepTotals] = field(default_factory=list)
    delayed: list[StepTotals] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        lengths = [k for run in self.delayed for k in run.drafted]
        alpha = statistics.mean(beta for run in self.delayed for beta in run.betas)
        tokens = sum(run.tokens for run in self.delayed) / len(lengths)
        local_s, delayed_s = (statistics.median(run.step_s for run in runs) for runs in (self.local, self.delayed))
        s_net = statistics.mean(expected_tokens(alpha, k) for k in lengths) / (local_s + self.rtt_s)
        return {
            "rtt_ms": 1000 * self.rtt_s,
            "gamma": statistics.mean(lengths),
            "alpha": alpha,
            "tokens_per_step": tokens,
            "step_ms": 1000 * local_s,
            "s_net": s_net,
            "measured": tokens / delayed_s,
            "ratio": tokens / delayed_s / s_net,
        }


def gamma_for(rtt_s: float, ar_step_s: float, four: StepTotals) -> int:
    """Return the closed form's draft length, given steps with four draft tokens and the time of an AR step."""
    c = four.draft_s / sum(four.drafted) / ar_step_s
    fixed_s = (four.link_s + four.host_s) / four.steps
    return max(1, best_gamma(four.alpha, c, longest=24, o=(rtt_s + fixed_s) / ar_step_s, plain=None))


def link_speeds(
    base: Recipe, prompts: Sequence[Prompt], pool: ModelPool, rtts_ms: Sequence[float], repeat: int
) -> Iterator[dict[str, Any]]:
    """Measure every RTT and draft length `repeat` times, on a prompt each, and yield a record for each."""
    assert base.cloud is not None
    ar = step_totals(replace(base, method="ar"), prompts, pool)
    ar_step_s = ar.cloud_s / ar.steps
    four = step_totals(replace(base, policy="fixed", gamma=4), prompts, pool)
    chosen = {rtt: gamma_for(rtt / 1000, ar_step_s, four) for rtt in rtts_ms}
    cells = {(rtt, length): LinkRuns(rtt / 1000) for rtt in rtts_ms for length in LENGTHS}
    for turn in range(repeat):
        for (rtt, length), cell in cells.items():
            gamma = chosen[rtt] if length == "closed form" else length
            varied: dict[str, Any] = DYNAMIC if gamma == "dynamic" else {"policy": "fixed", "gamma": gamma}
            local, prompt = replace(base, **varied), [prompts[turn % len(prompts)]]
            delayed = replace(local, cloud=replace(base.cloud, rtt_ms=rtt))
            pair = [(local, rtt / 1000, cell.local), (delayed, 0.0, cell.delayed)]
            for recipe, pause_s, runs in pair if turn % 2 else reversed(pair):
                runs.append(step_totals(recipe, prompt, pool, pause_s))
    for (_, length), cell in cells.items():
        yield {"length": length, **cell.record()}


def link(options: argparse.Namespace) -> None:
    """Measure the speed over links of several round-trip times (RTT)."""
    pool, prompts = ModelPool(), load_prompts(kinds=["code"])[: options.prompts]
    with cloud_service() as service:
        cloud = CloudConfig(service.url, encoding="msgpack", deadline_ms=5000)
        base = Recipe(temperature=0.0, top_p=1.0, max_tokens=options.max_tokens, cloud=cloud)
        step_totals(replace(base, max_tokens=8), prompts, pool)  # warm-up
        publish(options, "link", LINK_COLUMNS, list(link_speeds(base, prompts, pool, options.rtts, options.repeat)))


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


def step_bytes(base: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[dict[str, Any]]:
    """Yield measured and theoretical bytes per step for every kind of draft and every encoding."""
    drafter = plan_run(base).drafter
    assert base.cloud is not None and drafter is not None
    vocab_size = pool.get(drafter).vocab_size
    for name, (settings, q_rows, q_bytes) in DRAFT_KINDS.items():
        for encoding in ENCODINGS:
            cloud = replace(base.cloud, q_rows=q_rows, encoding=encoding)
            totals = step_totals(replace(base, **settings, gamma=4, cloud=cloud), prompts, pool)
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


def traffic(options: argparse.Namespace) -> None:
    """Count the bytes of a step by draft, rule and encoding."""
    pool, prompts = ModelPool(), load_prompts(kinds=["code"])[: options.prompts]
    with cloud_service() as service:
        cloud = CloudConfig(service.url, deadline_ms=5000)
        base = Recipe(temperature=0.0, top_p=1.0, max_tokens=options.max_tokens, cloud=cloud)
        publish(options, "traffic", TRAFFIC_COLUMNS, list(step_bytes(base, prompts, pool)))


STUDIES = {
    "gates": Study(
        gates,
        {"temperature": 0.0, "gamma": 4, "max_tokens": 32}
        | {"ratio": {"type": float, "default": 0.3, "help": "share of hard tokens that requires a call"}}
        | {"prompts": {"type": int, "default": 12, "help": "prompts of class code, half for calibration"}},
    ),
    "link": Study(link, {"rtts": RTTS_MS, "repeat": 12, "prompts": 12, "max_tokens": 48}),
    "modes": Study(modes, {"rtt_ms": 30.0, "temperature": 0.0, "gamma": 4, "prompts": 6, "max_tokens": 64}),
    "traffic": Study(traffic, {"prompts": 2, "max_tokens": 64}),
}
main = study_command(__file__, __doc__, TABLES, STUDIES)

if __name__ == "__main__":
    sys.exit(main())
