"""Check the CUDA path on this machine's GPU: `python -m benchmarks.gpu_check`, with `--pair NAME` for a larger pair.

Each check runs in its own process, since a CUDA error ends all CUDA work of a process.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from benchmarks.tables import publish, run_study, study_parser
from specdemo import generate
from specdemo.bench.measure import copy_bandwidth
from specdemo.core.errors import UserError
from specdemo.core.events import End, StepEvent
from specdemo.core.sampling import Noise
from specdemo.core.step import Draft
from specdemo.models.batch_invariance import Measurement, check_invariance
from specdemo.models.engines.cuda_graphs import MAX_ROWS
from specdemo.models.engines.select import engine_of
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel, load
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe

PROMPT = "def fibonacci(n):\n"
TOLERANCE = 2e-2  # of the largest logit, in two-byte dtypes
VOCAB, BINS, DRAWS = 150_000, 100, 20_000
CRITICAL = 149.4  # 0.999 quantile of chi-square with 99 degrees of freedom
LONG = 2_000  # tokens
FREE_BYTES = 256 << 20  # left under memory pressure
UTILISATION = 0.8  # of the copy bandwidth
TIMEOUT_S = 1200

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
    errors = {form: replay_error(target(recipe, quantization=form)) for form in ("none", "nf4", "nf4-single", "fp4")}
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
    """AR decoding uses the memory bandwidth."""
    pool, ar = ModelPool(), replace(recipe, method="ar", max_tokens=200)
    text_of(ar, pool)
    start = time.perf_counter()
    count = len(text_of(ar, pool))
    seconds = (time.perf_counter() - start) / count
    loaded = pool.take(ar.target_spec)
    share = loaded.weight_bytes / seconds / copy_bandwidth(loaded.model.device)
    return f"{1 / seconds:.0f} tokens/s, {share:.0%} of the copy bandwidth (aim: {UTILISATION:.0%})"


def sanitizer(recipe: Recipe) -> str:
    """No illegal access."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "skipped: compute-sanitizer is not installed"
    run = f"list(generate(Recipe(target={recipe.models[0]!r}, method='self', max_tokens=8), {PROMPT!r}))"
    script = f"from specdemo import Recipe, generate\nfor _ in range(3): {run}"
    command = [tool, "--error-exitcode", "1", sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return require(result.returncode == 0, next(iter(result.stdout.splitlines()[-1:]), "no output"))


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        *(int8, replay, second_gpu, memory_pressure, loading, reserved_memory),
        *(float16_range, sampler, verification, bandwidth, sanitizer),
    )
}


def run_check(name: str, recipe: Recipe) -> str:
    try:
        return f"passed: {CHECKS[name](recipe)}".replace("passed: skipped", "skipped")
    except (CheckFailed, UserError, RuntimeError) as error:
        return f"failed: {next(iter(str(error).splitlines()), type(error).__name__)}"


def study(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("No GPU is present: nothing was checked.")
        return 0
    if options.only:
        print(run_check(options.only, Recipe(pair=options.pair, device="cuda", temperature=0.0, max_tokens=100)))
        return 0
    records = []
    for name, check in CHECKS.items():
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--pair", options.pair, "--only", name]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            lines = (result.stdout.splitlines() or result.stderr.splitlines())[-1:]
            outcome = lines[0] if result.returncode == 0 and lines else f"failed: {' '.join(lines)}"
        except subprocess.TimeoutExpired:
            outcome = "failed: timeout"
        status, _, detail = outcome.partition(": ")
        records.append({"check": name, "meaning": check.__doc__, "result": status, "detail": detail})
    columns = {"check": "{check}", "meaning": "{meaning}", "result": "{result}", "detail": "{detail}"}
    publish(options, "gpu_check", columns, records)
    return int(any(record["result"] == "failed" for record in records))


def main() -> int:
    parser = study_parser(__file__, __doc__)
    parser.add_argument("--pair", default="bundled", help="models to check (default: bundled)")
    parser.add_argument("--only", choices=CHECKS, help="run one check in this process")
    return run_study(study, parser)


if __name__ == "__main__":
    sys.exit(main())
