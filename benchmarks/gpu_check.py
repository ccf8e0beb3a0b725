"""Check the CUDA path on this machine's GPU: table `gpu_check` (docs/models.md).

`python -m benchmarks.gpu_check --pair bundled smollm2-135m --target DIRECTORY --write`. Each check runs in its own
process, since a CUDA error ends all CUDA work of a process.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import publish, run_study, study_parser
from specdemo import generate
from specdemo.bench.measure import copy_bandwidth, grid, measure
from specdemo.bench.table import table
from specdemo.core.errors import UserError
from specdemo.core.events import End, StepEvent
from specdemo.core.sampling import Noise
from specdemo.core.step import Draft
from specdemo.models.batch_invariance import Measurement, check_invariance
from specdemo.models.engines.cuda_graphs import MAX_ROWS
from specdemo.models.engines.select import engine_of
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel, load
from specdemo.models.memory import release_memory
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe

PROMPT = "def fibonacci(n):\n"
TOLERANCE = 2e-2  # of the largest logit, in two-byte dtypes
VOCAB, BINS, DRAWS = 150_000, 100, 20_000
CRITICAL = 149.4  # 0.999 quantile of chi-square with 99 degrees of freedom
LONG = 2_000  # tokens
FREE_BYTES = 256 << 20  # left under memory pressure
UTILISATION = 0.8  # of the copy bandwidth
LEAST_PLAN = 0.9  # of the measured memory
TIMEOUT_S = 1200

FORMS = ("none", "int8", "nf4")
TABLES = {"gpu_check": "docs/models.md"}
COLUMNS = {name: f"{{{name}}}" for name in ("model", "check", "meaning", "result", "detail")}

Check = Callable[[Recipe], str]


class CheckFailed(Exception):
    """A check's result differs from the expectation."""


def text_of(recipe: Recipe, pool: ModelPool | None = None) -> list[int]:
    """Return the tokens of a run. Raises `CheckFailed` if the run fails."""
    events = list(generate(recipe, PROMPT, pool))
    if isinstance(end := events[-1], End) and end.reason == "error":
        raise CheckFailed(end.error)
    return [token for event in events if isinstance(event, StepEvent) for token in event.step.tokens]


def require(condition: bool, detail: str) -> str:
    if not condition:
        raise CheckFailed(detail)
    return detail


def target(recipe: Recipe, **changed: object) -> LoadedModel:
    loaded = load(replace(recipe, **changed).target_spec)
    require(loaded.engine.startswith("lean"), f"engine {loaded.engine}")
    return loaded


@contextmanager
def eager(loaded: LoadedModel) -> Iterator[CachedModel]:
    loaded.release()
    with engine_of(loaded.model).recording_disabled():
        yield CachedModel(loaded.model)
    loaded.release()


def passes(vocab_size: int, context: int) -> Iterator[tuple[list[int], Draft]]:
    """Yield texts with chains and forests of 1 to 16 rows, below and above 512 keys."""
    rng = random.Random(0)
    for length in (100, 250, 600, 1100):
        text = [rng.randrange(vocab_size) for _ in range(min(length, context - 2 * MAX_ROWS))]
        for rows in range(1, MAX_ROWS + 1):
            for chain in (True, False):
                parents = tuple(i - 1 if chain else rng.randrange(-1, i) for i in range(rows - 1))
                yield text, Draft()
                yield [*text, rows], Draft(tuple(rng.randrange(vocab_size) for _ in parents), parents)


def replay_error(loaded: LoadedModel) -> float:
    """Return the largest difference of recorded and eager logits, relative to the largest logit."""
    with eager(loaded) as cached:
        context = min(cached.context, 2048)
        script = list(passes(cached.vocab_size, context))
        expected = [cached.score(*item).cpu() for item in script]
        del cached
    replayed, worst = CachedModel(loaded.model), 0.0
    for item, logits in zip(script, expected, strict=True):
        difference = (replayed.score(*item).cpu().float() - logits.float()).abs().max()
        worst = max(worst, float(difference / logits.float().abs().max()))
    if loaded.model.graph_failure:
        raise CheckFailed(f"capture failed: {loaded.model.graph_failure}")
    return worst


def replay(recipe: Recipe) -> str:
    """Replayed graphs equal eager passes."""
    errors = {form: replay_error(target(recipe, quantization=form)) for form in ("none", "nf4")}
    detail = ", ".join(f"{form} {error:.1e}" for form, error in errors.items())
    return require(max(errors.values()) <= TOLERANCE, f"relative error: {detail}")


def int8(recipe: Recipe) -> str:
    """The first LLM.int8() pass works, eagerly and recorded."""
    error = replay_error(target(recipe, quantization="int8"))
    return require(error <= TOLERANCE, f"relative error {error:.1e}")


def second_gpu(recipe: Recipe) -> str:
    """Graphs on `cuda:1` replay their inputs."""
    if torch.cuda.device_count() < 2:
        return "skipped: one GPU"
    error = replay_error(target(recipe, device="cuda:1"))
    return require(error <= TOLERANCE, f"relative error {error:.1e}")


def memory_pressure(recipe: Recipe) -> str:
    """A run with little free memory continues eagerly or ends with a message; the text is unchanged."""
    pool, expected = ModelPool(), text_of(recipe)
    text_of(replace(recipe, max_tokens=1), pool)
    free = torch.cuda.mem_get_info()[0] - FREE_BYTES
    ballast = torch.empty(max(0, free), dtype=torch.uint8, device="cuda")
    equal = text_of(recipe, pool) == expected
    return require(equal, f"{len(ballast) / 1e9:.1f} GB occupied, same text: {equal}")


def loading(recipe: Recipe) -> str:
    """Decoding is unaffected by another model that loads meanwhile."""
    pool, expected = ModelPool(), text_of(recipe)
    thread = threading.Thread(target=lambda: [load(recipe.target_spec, warm=False) for _ in range(5)])
    thread.start()
    runs = [text_of(recipe, pool)]
    while thread.is_alive():
        runs.append(text_of(recipe, pool))
    return require(all(run == expected for run in runs), f"{len(runs)} runs while loading")


def reserved_memory(recipe: Recipe) -> str:
    """Memory does not grow from run to run."""
    pool, sizes = ModelPool(), []
    for _ in range(4):
        for method in (recipe.method, "self"):
            text_of(replace(recipe, method=method, max_tokens=LONG), pool)
        sizes.append(torch.cuda.memory_reserved())
    detail = ", ".join(f"{size / 1e6:.0f}" for size in sizes)
    return require(sizes[-1] <= 1.02 * sizes[1], f"MB reserved after each round: {detail}")


def float16_range(recipe: Recipe) -> str:
    """Logits are finite in float16."""
    cached = CachedModel(target(recipe, dtype="float16").model)
    worst = max(float(cached.score(*item).abs().max()) for item in passes(cached.vocab_size, min(cached.context, 2048)))
    return require(worst < torch.finfo(torch.float16).max, f"largest logit {worst:.1f}")


def sampler(recipe: Recipe) -> str:
    """Samples of a flat distribution are uniform."""
    noise, probs = Noise(0, "check"), torch.full((VOCAB,), 1 / VOCAB, device="cuda")
    drawn = torch.cat([noise.sample_on_device(probs) for _ in range(DRAWS)]) * BINS // VOCAB
    counts = torch.bincount(drawn, minlength=BINS).double()
    statistic = float(((counts - DRAWS / BINS) ** 2).sum() / (DRAWS / BINS))
    return require(statistic < CRITICAL, f"chi-square {statistic:.1f} of {BINS - 1} degrees of freedom")


def verification(recipe: Recipe) -> str:
    """Cost of passes with several rows."""
    loaded = target(recipe, quantization="nf4")
    result = check_invariance(loaded.model, Measurement(seconds=4.0))
    costs = ", ".join(f"{rows} rows {cost:.2f}" for rows, cost in result.cost.items())
    return f"nf4, in AR passes: {costs}; equal bits: {result.equal}"


def bandwidth(recipe: Recipe) -> str:
    """Use of the memory bandwidth by AR decoding."""
    figures = []
    for form in FORMS:
        pool, ar = ModelPool(), replace(recipe, method="ar", quantization=form, max_tokens=200)
        text_of(ar, pool)
        start = time.perf_counter()
        count = len(text_of(ar, pool))
        seconds = (time.perf_counter() - start) / count
        loaded = pool.take(ar.target_spec)
        share = loaded.weight_bytes / seconds / copy_bandwidth(loaded.model.device)
        figures.append(f"{form} {loaded.weight_bytes / 1e9:.2f} GB {1 / seconds:.0f} tokens/s, {share:.0%}")
    return f"{'; '.join(figures)} of the copy bandwidth (aim: {UTILISATION:.0%})"


def planned_memory(recipe: Recipe) -> str:
    """The plan is not below the memory of tensors after a run."""
    figures, least = [], float("inf")
    for form in FORMS:
        pool, ar = ModelPool(), replace(recipe, method="ar", quantization=form)
        plan = plan_spec(ar.target_spec.resolved(), ar.max_tokens + len(PROMPT))
        release_memory()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        text_of(ar, pool)
        used, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        resting = plan.weights + plan.kv * plan.keeps_kv + plan.settled
        least = min(least, resting / used)
        figures.append(
            f"{form} {resting / 1e9:.2f} of {used / 1e9:.2f} GB, peak {plan.peak / 1e9:.2f} of {peak / 1e9:.2f}"
        )
    return require(least >= LEAST_PLAN, f"planned of measured: {'; '.join(figures)}")


def speed(recipe: Recipe) -> str:
    """Speed-ups over AR decoding; greedy texts are those of AR decoding."""
    methods = dict.fromkeys((recipe.method, "nasd"))
    recipes = [replace(recipe, max_tokens=96, **values) for values in grid([*methods], [3], ["fixed"], [0.0, 1.0])]
    prompts = load_prompts(chat=recipe.chat)
    prompts = [prompt for prompt in prompts if prompt.kind == prompts[0].kind]
    records = [item for item in measure(recipes, prompts, ModelPool()) if isinstance(item, dict)]
    rows = table(recipes, records)
    figures = ", ".join(f"{row.lane} {row.speedup:.2f}" for row in rows if row.speedup is not None)
    same = all(row.same_text == row.prompts for row in rows if row.same_text is not None)
    return require(same, f"{len(prompts)} prompts, AR {rows[0].tokens_per_second:.0f} tokens/s; {figures}")


def sanitizer(recipe: Recipe) -> str:
    """No illegal access."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "skipped: compute-sanitizer is not installed"
    run = f"list(generate(Recipe(target={recipe.models[0]!r}, device='cuda', method='self', max_tokens=8), {PROMPT!r}))"
    script = f"from specdemo import Recipe, generate\nfor _ in range(3): {run}"
    command = [tool, "--error-exitcode", "1", sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return require(result.returncode == 0, next(iter(result.stdout.splitlines()[-1:]), "no output"))


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        *(int8, replay, second_gpu, memory_pressure, loading, reserved_memory),
        *(float16_range, sampler, verification, bandwidth, planned_memory, speed, sanitizer),
    )
}


MEASUREMENTS = ("verification", "bandwidth")


def recipe_of(pair: str, target: str | None) -> Recipe:
    """Return the greedy recipe of a pair, or of a target."""
    settings: dict[str, Any] = {"device": "cuda", "temperature": 0.0, "max_tokens": 100}
    if target:
        return Recipe(target=target, method="nasd", **settings)
    return Recipe(pair=pair, method="eagle" if PAIRS[pair].head else "draft", chat=pair == CHAT_PAIR, **settings)


def run_check(name: str, recipe: Recipe) -> str:
    """Return a line of result and detail."""
    try:
        detail = CHECKS[name](recipe)
        return f"{'measured' if name in MEASUREMENTS else 'passed'}: {detail}".replace("passed: skipped", "skipped")
    except (CheckFailed, UserError, RuntimeError) as error:
        return f"failed: {next(iter(str(error).splitlines()), type(error).__name__)}"


def outcome_of(command: Sequence[str]) -> str:
    """Run a check in a process and return its last line."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "failed: timeout"
    lines = (result.stdout.splitlines() or result.stderr.splitlines())[-1:]
    return lines[0] if result.returncode == 0 and lines else f"failed: {' '.join(lines)}"


def study(options: argparse.Namespace) -> int:
    """Run the checks and publish their results."""
    if not torch.cuda.is_available():
        print("No GPU is present: nothing was checked.")
        return 0
    if options.only:
        print(run_check(options.only, recipe_of(options.pair[0], next(iter(options.target), None))))
        return 0
    models = [*(("--pair", pair) for pair in options.pair), *(("--target", target) for target in options.target)]
    records = []
    for model, name in product(models, CHECKS):
        outcome = outcome_of([sys.executable, "-m", "benchmarks.gpu_check", *model, "--only", name])
        status, _, detail = outcome.partition(": ")
        record = {"model": Path(model[1]).name, "check": name, "meaning": CHECKS[name].__doc__}
        records.append(record | {"result": status, "detail": detail})
    publish(options, "gpu_check", COLUMNS, records)
    return int(any(record["result"] == "failed" for record in records))


def main() -> int:
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--pair", nargs="+", default=["bundled"], help="pairs to check (default: bundled)")
    parser.add_argument("--target", nargs="+", default=[], metavar="M", help="targets to check as well")
    parser.add_argument("--only", choices=CHECKS, help="run one check of one model in this process")
    return run_study(study, parser)


if __name__ == "__main__":
    sys.exit(main())
