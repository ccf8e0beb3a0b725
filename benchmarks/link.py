"""Edge-cloud speed over links of several round-trip times (RTT): table `link` in docs/edge-cloud.md.

`OMP_NUM_THREADS=1 python -m benchmarks.link --write`. Two processes over loopback with an emulated delay.

A step takes gamma draft tokens, a target pass, an RTT and the overhead of HTTP and two Python processes:
S_net = E[tokens] / (v + gamma c + r + o) AR steps, r = RTT / T_target. All terms but r are measured without a delay,
with the same idle time between steps as on the link, because an idle processor starts slowly. The two runs of a pair
alternate; times are medians over the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.runs import StepTotals, cloud_service, step_totals
from benchmarks.tables import publish, run_study, study_parser
from specdemo.core.theory import best_gamma_over, expected_tokens
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

TABLES = {"link": "docs/edge-cloud.md"}
RTTS_MS = (0.0, 30.0, 100.0)
LENGTHS: tuple[int | str, ...] = (2, 4, 8, "dynamic", "closed form")
DYNAMIC = {"policy": "dynamic", "gamma": 6}  # initial length of the practice guide
COLUMNS = {
    "RTT ms": "{rtt_ms:.0f}",
    "length": "{length}",
    "gamma": "{gamma:.1f}",
    "alpha": "{alpha:.2f}",
    "tokens/step": "{tokens_per_step:.2f}",
    "step without RTT, ms": "{step_ms:.1f}",
    "S_net": "{s_net:.1f}",
    "measured": "{measured:.1f}",
    "measured / S_net": "{ratio:.2f}",
}


@dataclass
class LinkRuns:
    """Runs for an RTT and draft length, without and with the emulated delay."""

    rtt_s: float
    local: list[StepTotals] = field(default_factory=list)
    delayed: list[StepTotals] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return predicted and measured tokens per second."""
        lengths = [k for run in self.delayed for k in run.drafted]
        alpha = statistics.mean(beta for run in self.delayed for beta in run.betas)
        tokens = sum(run.tokens for run in self.delayed) / len(lengths)
        local_s, delayed_s = (statistics.median(run.step_s for run in runs) for runs in (self.local, self.delayed))
        s_net = statistics.mean(expected_tokens(alpha, k) for k in lengths) / (local_s + self.rtt_s)
        return {
            "rtt_ms": 1000 * self.rtt_s,
            "gamma": statistics.mean(lengths),
            "alpha": alpha,
            "steps": len(lengths),
            "tokens_per_step": tokens,
            "step_ms": 1000 * local_s,
            "s_net": s_net,
            "predicted": tokens / (local_s + self.rtt_s),
            "measured": tokens / delayed_s,
            "ratio": tokens / delayed_s / s_net,
        }


def gamma_for(rtt_s: float, ar_step_s: float, four: StepTotals) -> int:
    """Return the closed form's draft length, given steps with four draft tokens and the time of an AR step."""
    c = four.draft_s / sum(four.drafted) / ar_step_s
    fixed_s = (four.link_s + four.host_s) / four.steps
    return max(1, best_gamma_over(four.alpha, c, (rtt_s + fixed_s) / ar_step_s, longest=24))


def speeds(
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


def study(options: argparse.Namespace) -> None:
    """Measure and publish the table."""
    pool, prompts = ModelPool(), load_prompts(kinds=["code"])[: options.prompts]
    with cloud_service() as service:
        link = CloudConfig(service.url, encoding="msgpack", deadline_ms=5000)
        base = Recipe(temperature=0.0, top_p=1.0, max_tokens=options.max_tokens, cloud=link)
        step_totals(replace(base, max_tokens=8), prompts, pool)  # warm-up
        publish(options, "link", COLUMNS, list(speeds(base, prompts, pool, options.rtts, options.repeat)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--rtts", type=float, nargs="+", default=RTTS_MS, metavar="MS")
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=48)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
