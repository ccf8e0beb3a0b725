"""Edge and cloud over links of several lengths: ``python -m benchmarks.link``. Two processes over loopback.

A round takes gamma drafted tokens, one pass of the target, a round trip, and what HTTP and two Pythons add; so
S_net = E[tokens] / (v + gamma c + r + o) plain steps (the time model with r = RTT / T_target). All but r is measured
where no round trip is emulated, with rounds as far apart in time as the link would have them: a processor that has
idled is slower than a busy one, and that is no part of the round trip. What is measured over the link is compared with
what that foretells. Both runs of a pair follow one another at once, in an order that turns from pair to pair, and
times are medians over the pairs, since the machine's mood changes within a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.cloud import Rounds, cloud, rounds
from specdemo.core.theory import best_gamma_over, expected_tokens
from specdemo.models.model_pool import ModelPool
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

RTTS = (0.0, 10.0, 30.0, 60.0, 100.0)  # milliseconds
LENGTHS: tuple[int | str, ...] = (2, 4, 6, 8, "dynamic", "closed form")
DYNAMIC = {"policy": "dynamic", "gamma": 6}  # the practice guide's start


@dataclass
class Cell:
    """One round trip and draft length: the runs at rest, and those over the link."""

    rtt_s: float
    here: list[Rounds] = field(default_factory=list)
    far: list[Rounds] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Tokens per second as foretold and as measured."""
        lengths = [k for run in self.far for k in run.drafted]
        alpha = statistics.mean(beta for run in self.far for beta in run.betas)
        tokens = sum(run.tokens for run in self.far) / len(lengths)
        rest_s, far_s = (statistics.median(run.round_s for run in runs) for runs in (self.here, self.far))
        return {
            "rtt_ms": 1000 * self.rtt_s,
            "gamma": statistics.mean(lengths),
            "alpha": alpha,
            "rounds": len(lengths),
            "tokens_per_round": tokens,
            "round_ms": 1000 * rest_s,
            "s_net": statistics.mean(expected_tokens(alpha, k) for k in lengths) / (rest_s + self.rtt_s),
            "foretold": tokens / (rest_s + self.rtt_s),
            "measured": tokens / far_s,
        }


def gamma_for(rtt_s: float, step_s: float, four: Rounds) -> int:
    """The closed form's length, from what rounds of four tokens were and a plain step takes."""
    c = four.draft_s / sum(four.drafted) / step_s
    fixed_s = (four.wire_s + four.host_s) / four.count
    return max(1, best_gamma_over(four.alpha, c, (rtt_s + fixed_s) / step_s, longest=24))


def speeds(
    base: Recipe, prompts: Sequence[Prompt], pool: ModelPool, rtts: Sequence[float], repeat: int
) -> Iterator[dict[str, Any]]:
    """A record per round trip and draft length, after all runs: `repeat` times every cell, a prompt each time."""
    assert base.cloud is not None
    plain = rounds(replace(base, method="ar"), prompts, pool)  # a round trip per token: what a step costs the cloud
    step_s = plain.cloud_s / plain.count
    four = rounds(replace(base, policy="fixed", gamma=4), prompts, pool)
    chosen = {rtt: gamma_for(rtt / 1000, step_s, four) for rtt in rtts}
    cells = {(rtt, length): Cell(rtt / 1000) for rtt in rtts for length in LENGTHS}
    for turn in range(repeat):
        for (rtt, length), cell in cells.items():
            gamma = chosen[rtt] if length == "closed form" else length
            varied: dict[str, Any] = DYNAMIC if gamma == "dynamic" else {"policy": "fixed", "gamma": gamma}
            near, prompt = replace(base, **varied), [prompts[turn % len(prompts)]]
            over = replace(near, cloud=replace(base.cloud, rtt_ms=rtt))
            pair = [(near, rtt / 1000, cell.here), (over, 0.0, cell.far)]
            for recipe, apart_s, runs in pair if turn % 2 else reversed(pair):
                runs.append(rounds(recipe, prompt, pool, apart_s))
    for (_, length), cell in cells.items():
        yield {"length": length, **cell.record()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and a JSON line."""
    parser = argparse.ArgumentParser(prog="benchmarks.link")
    parser.add_argument("--rtts", type=float, nargs="+", default=RTTS, metavar="MS")
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args(arguments)
    pool, prompts = ModelPool(), load_prompts(kinds=["code"])[: options.prompts]
    with cloud() as service:
        wire = CloudConfig(service.url, encoding="msgpack", deadline_ms=5000)
        base = Recipe(temperature=0.0, top_p=1.0, max_tokens=options.max_tokens, cloud=wire)
        rounds(replace(base, max_tokens=8), prompts, pool)  # first calls are no measure of anything
        found = list(speeds(base, prompts, pool, options.rtts, options.repeat))
    print(
        "| RTT ms | length | gamma | alpha | tokens/round | round at rest ms | S_net | with the tokens seen | measured "
        "| measured / S_net |\n" + "|---" * 10 + "|"
    )
    for one in found:
        print(
            f"| {one['rtt_ms']:.0f} | {one['length']} | {one['gamma']:.1f} | {one['alpha']:.2f} "
            f"| {one['tokens_per_round']:.2f} | {one['round_ms']:.1f} | {one['s_net']:.1f} | {one['foretold']:.1f} "
            f"| {one['measured']:.1f} | {one['measured'] / one['s_net']:.2f} |"
        )
    print(json.dumps({"speeds": found}))


if __name__ == "__main__":
    main()
