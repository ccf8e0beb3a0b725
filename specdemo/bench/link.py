"""Edge and cloud over links of several lengths: ``python -m specdemo.bench.link``. Two processes over loopback.

A round takes gamma drafted tokens, one pass of the target, a round trip, and what HTTP and two Pythons add; so
S_net = E[tokens] / (v + gamma c + r + o) plain steps (the time model with r = RTT / T_target). All but r is measured
where no round trip is emulated; what is measured elsewhere is compared with what that foretells. The second table is
what travels: bytes of a round by kind of draft and rule, against what the ids and laws alone would take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from specdemo.bench.measure import Prompt, load_prompts
from specdemo.core.theory import best_gamma_over, expected_tokens
from specdemo.generate import generate
from specdemo.models.shelf import Shelf
from specdemo.recipe import Recipe
from specdemo.remote.choices import Cloud

RTTS = (0.0, 10.0, 30.0, 60.0, 100.0)  # milliseconds
LENGTHS: tuple[int | str, ...] = (2, 4, 6, 8, "dynamic", "closed form")
DYNAMIC = {"policy": "dynamic", "gamma": 6}  # the practice guide's start


@dataclass(frozen=True)
class Rounds:
    """What the rounds of some runs add up to, the prefill left out."""

    rounds: int
    tokens: int
    drafted: int
    draft_s: float
    cloud_s: float
    wire_s: float  # from the question to the verdict, but for the cloud's own time
    host_s: float
    beta: float
    up: float
    down: float
    rows: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.draft_s + self.cloud_s + self.wire_s + self.host_s


@contextmanager
def cloud(*options: str) -> Iterator[str]:
    """The service in a process of its own; its address."""
    command = [sys.executable, "-m", "specdemo", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().removeprefix("listening on ").strip()
        finally:
            process.terminate()


def rounds(recipe: Recipe, prompts: Sequence[Prompt], shelf: Shelf) -> Rounds:
    """Run `recipe` on every prompt."""
    steps: list[dict[str, Any]] = []
    for prompt in prompts:
        lines = list(generate(recipe, prompt.text, shelf))
        if lines[-1]["error"]:
            raise RuntimeError(lines[-1]["error"])
        steps += [line for line in lines if "i" in line][1:]
    betas = [beta for step in steps for beta in step["beta"] if beta is not None]
    cloud_s = sum(step["remote"]["cloud_s"] for step in steps)
    return Rounds(
        len(steps),
        sum(len(step["tokens"]) for step in steps),
        sum(len(step["draft"]) for step in steps),
        sum(step["draft_s"] for step in steps),
        cloud_s,
        sum(step["verify_s"] for step in steps) - cloud_s,
        sum(step["host_s"] for step in steps),
        statistics.mean(betas) if betas else 0.0,
        *(sum(step["remote"][name] for step in steps) for name in ("bytes_up", "bytes_down", "rows")),
    )


def speeds(base: Recipe, prompts: Sequence[Prompt], shelf: Shelf) -> Iterator[dict[str, Any]]:
    """A record per round trip and draft length: tokens per second as foretold and as measured."""
    assert base.cloud is not None
    plain = rounds(replace(base, method="ar"), prompts, shelf)  # a round trip per token: what a step costs the cloud
    step_s = plain.cloud_s / plain.rounds
    four = plain  # what rounds of four tokens were when last seen, which the closed form is fed with
    for rtt in RTTS:
        for length in LENGTHS:
            gamma: int | str = length
            if length == "closed form":
                c = four.draft_s / four.drafted / step_s
                fixed = (four.wire_s + four.host_s) / four.rounds
                gamma = max(1, best_gamma_over(four.beta, c, (rtt / 1000 + fixed) / step_s, longest=24))
            varied: dict[str, Any] = DYNAMIC if gamma == "dynamic" else {"policy": "fixed", "gamma": gamma}
            recipe = replace(base, **varied)
            here = rounds(recipe, prompts, shelf)  # just before, so that the machine is in the same mood
            four = here if gamma == 4 else four
            far = rounds(replace(recipe, cloud=replace(base.cloud, rtt_ms=rtt)), prompts, shelf)
            per_round = here.seconds / here.rounds + rtt / 1000
            yield {
                "rtt_ms": rtt,
                "length": length,
                "gamma": gamma if isinstance(gamma, int) else far.drafted / far.rounds,
                "alpha": far.beta,
                "tokens_per_round": far.tokens / far.rounds,
                "s_net": expected_tokens(here.beta, here.drafted / here.rounds) / per_round,
                "foretold": here.tokens / here.rounds / per_round,
                "measured": far.tokens / far.seconds,
            }


def traffic(base: Recipe, prompts: Sequence[Prompt], shelf: Shelf) -> Iterator[dict[str, Any]]:
    """A record per kind of draft, rule and encoding: bytes of a round each way, and what theory has for them."""
    assert base.cloud is not None and base.drafter_spec is not None
    vocab_size = shelf.take(base.drafter_spec).vocab_size
    kinds = {
        "point masses (T=0)": ({"temperature": 0.0}, "float32", 0),
        "coupled": ({"temperature": 1.0, "rule": "coupled"}, "float32", 0),
        "scalar q (lossy)": ({"temperature": 1.0}, "scalar", 4),
        "row of float32": ({"temperature": 1.0}, "float32", 4),
        "row of float16": ({"temperature": 1.0}, "float16", 4),
    }
    for name, (settings, q_rows, q_bytes) in kinds.items():
        for encoding in ("json", "msgpack"):
            wire = replace(base.cloud, q_rows=q_rows, encoding=encoding)
            found = rounds(replace(base, **settings, gamma=4, cloud=wire), prompts, shelf)
            k = found.drafted / found.rounds
            width = {"float32": 4, "float16": 2, "scalar": 0}[q_rows]
            yield {
                "mode": name,
                "encoding": encoding,
                "k": k,
                "rows": found.rows / found.rounds,
                "theory_up": (4 + q_bytes) * k + found.rows / found.rounds * vocab_size * width,
                "theory_down": 8.0,
                "up": found.up / found.rounds,
                "down": found.down / found.rounds,
                "all_of_q": (4 + 4 * vocab_size) * k,
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables and a JSON line each."""
    parser = argparse.ArgumentParser(prog="specdemo.bench.link")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--bytes", action="store_true", help="only what travels: no time is taken")
    parser.add_argument("--speeds", action="store_true", help="only the times")
    options = parser.parse_args(arguments)
    shelf, prompts = Shelf(), load_prompts(kinds=["code"])[: options.prompts]
    with cloud() as url:
        wire = Cloud(url, encoding="msgpack", deadline_ms=5000)
        base = Recipe(temperature=0.0, top_p=1.0, max_tokens=options.max_tokens, cloud=wire)
        rounds(replace(base, max_tokens=8), prompts, shelf)  # first calls are no measure of anything
        found = []
        print("| RTT ms | length | gamma | alpha | tokens/round | S_net | with the tokens seen | measured | ratio |")
        print("|---|---|---|---|---|---|---|---|---|")
        for one in () if options.bytes else speeds(base, prompts, shelf):
            found.append(one)
            print(
                f"| {one['rtt_ms']:.0f} | {one['length']} | {one['gamma']:.1f} | {one['alpha']:.2f} "
                f"| {one['tokens_per_round']:.2f} | {one['s_net']:.1f} | {one['foretold']:.1f} "
                f"| {one['measured']:.1f} | {one['measured'] / one['foretold']:.2f} |",
                flush=True,
            )
        print(json.dumps({"speeds": found}))
        found = []
        print("| draft and rule | encoding | k | rows/round | up, theory | up | down, theory | down | all of q up |")
        print("|---|---|---|---|---|---|---|---|---|")
        for one in () if options.speeds else traffic(base, prompts, shelf):
            found.append(one)
            print(
                f"| {one['mode']} | {one['encoding']} | {one['k']:.1f} | {one['rows']:.2f} | {one['theory_up']:,.0f} "
                f"| {one['up']:,.0f} | {one['theory_down']:.0f} | {one['down']:,.0f} | {one['all_of_q']:,.0f} |",
                flush=True,
            )
        print(json.dumps({"traffic": found}))


if __name__ == "__main__":
    main()
