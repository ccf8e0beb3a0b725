"""What models take, planned and measured: ``python -m benchmarks.memory``, for `docs/models.md`.

Every case is a process of its own: a tiny model of other widths is loaded and run first, so that libraries have set
themselves up, then the case, with a long prompt. Measured is anonymous memory and what stays mapped of the weights'
files (on an accelerator, what tensors take); pages of files that are only passed through do not count, the system drops
them. The models are the bundled ones and others drawn at random on the spot.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.random_models import save_random
from specdemo.bench.progress import Progress
from specdemo.generate import generate
from specdemo.models.memory import device_bytes, peak_device_bytes, release_memory
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.quantization import unavailable
from specdemo.models.spec import QUANTIZATIONS, find_device
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe

EVERY_S = 0.002  # between two looks at the memory
OWN_PEAK, OWN_STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")  # a 5 in it: Linux counts anew
CONTEXT = 1024
FIRST = "tiny"
DRAWN = ("llama-30m", "llama-100m", "llama-300m", "qwen2-wide", "gpt2", "pythia-70m")
BUNDLED = {role: getattr(PAIRS["bundled"], role) for role in ("target", "drafter")}


@dataclass(frozen=True)
class Case:
    """One model in one form: bytes as planned, and as measured once loaded and run, and at the highest."""

    model: str
    quantization: str
    parameters: int
    planned: int
    measured: int
    planned_peak: int
    measured_peak: int


def measure(name: str, folder: str, quantization: str, device: str, first: str) -> Case:
    """Load and run it, watching memory, after the model at `first`. In a process that has done nothing else."""
    prompt = "x = 1\n" * (CONTEXT // 8)
    asked: dict[str, Any] = {
        "method": "nasd",
        "temperature": 0.8,
        "ngram_keep": False,
        "max_tokens": 48,
        "device": device,
    }
    pool, small = ModelPool(), Recipe(target=first, **asked)
    drive(small, "def f():\n", pool)
    drive(replace(small, quantization=quantization), "def f():\n", pool)  # what libraries take once for a form
    tokenizer = pool.take(small.target_spec).tokenizer  # every model here has it
    recipe = Recipe(target=folder, quantization=quantization, **asked)
    length = len(tokenizer.encode(prompt)) + recipe.max_tokens
    planned = plan_spec(recipe.target_spec.resolved(), length)
    where = find_device(device)
    release_memory()
    before, anonymous = used(where), used(where, mapped=False)
    with highest(where) as loading:
        pool.take(recipe.target_spec)
    with highest(where, files=False) as running:
        drive(recipe, prompt, pool)
    release_memory()
    after = used(where)
    stays_mapped = after - before - (used(where, mapped=False) - anonymous)
    return Case(
        name,
        quantization,
        planned.parameters,
        planned.resting,
        after - before,
        planned.peak,
        max(loading[0], running[0]) - anonymous + stays_mapped,
    )


def rounds(count: int, device: str, forms: Sequence[str]) -> Iterator[int]:
    """Bytes in use after each round of loading the bundled pair in each of `forms`, running it, and unloading all."""
    pool, where = ModelPool(), find_device(device)
    for i in range(count + 1):
        for form in forms:
            if unavailable(form, where) is None:
                asked = {"quantization": form, "drafter_quantization": form, "device": device}
                drive(Recipe(max_tokens=32, **asked), "def f():\n", pool)
        pool.clear()
        if i:  # libraries have set themselves up in the first
            yield used(where)


def drive(recipe: Recipe, prompt: str, pool: ModelPool) -> None:
    """Run it to its end."""
    *_, end = generate(recipe, prompt, pool)
    assert end.reason in ("length", "stop"), end.error


def used(device: torch.device, mapped: bool = True) -> int:
    """Bytes of this process, without pages of files unless `mapped`."""
    if (tensors := device_bytes(device)) is not None:
        return tensors
    memory = psutil.Process().memory_info()
    return memory.rss - (0 if mapped else getattr(memory, "shared", 0))


@contextmanager
def highest(device: torch.device, files: bool = True) -> Iterator[list[int]]:
    """A list whose only item is the most that was used meanwhile, without pages of files.

    Unless `files` are passed through, Linux counts it: a thread that looks is blind between two looks.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found, over = [used(device, mapped=False)], threading.Event()

    def look() -> None:
        while not over.wait(EVERY_S):
            found[0] = max(found[0], used(device, mapped=False))

    counts = not files and device.type == "cpu" and OWN_PEAK.exists()
    watch = threading.Thread(target=look, daemon=True)
    if counts:
        OWN_PEAK.write_text("5")
    else:
        watch.start()
    try:
        yield found
    finally:
        over.set()
        if counts:
            kibibytes = re.search(r"VmHWM:\s+(\d+)", OWN_STATUS.read_text())
            assert kibibytes is not None
            found[0] = 1024 * int(kibibytes[1]) - (used(device) - used(device, mapped=False))
        else:
            watch.join()
        found[0] = max(found[0], peak_device_bytes(device) or 0)


def markdown(cases: list[Case]) -> str:
    """A row per case."""
    lines = [
        "| model | parameters | quantisation | planned | measured | off by | planned peak | measured peak | off by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        lines.append(
            f"| {case.model} | {case.parameters / 1e6:.1f} M | {case.quantization} "
            f"| {_beside(case.planned, case.measured)} | {_beside(case.planned_peak, case.measured_peak)} |"
        )
    return "\n".join(lines)


def _beside(planned: int, measured: int) -> str:
    return f"{planned / 1e6:.1f} MB | {measured / 1e6:.1f} MB | {planned / measured - 1:+.0%}"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", choices=[*BUNDLED, *DRAWN], default=[*BUNDLED, *DRAWN])
    parser.add_argument("--quantization", nargs="+", choices=QUANTIZATIONS, default=["none", "bf16", "int8", "nf4"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", nargs=4, metavar=("NAME", "FOLDER", "QUANTIZATION", "FIRST"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, metavar="N", help="instead: load, run, switch and unload N times")
    options = parser.parse_args(arguments)
    if options.rounds:
        print("MB in use after each round:", end="", flush=True)
        for taken in rounds(options.rounds, options.device, options.quantization):
            print(f" {taken / 1e6:.1f}", end="", flush=True)
        print()
        return
    if options.one:
        name, folder, quantization, first = options.one
        print(json.dumps(asdict(measure(name, folder, quantization, options.device, first))))
        return
    cases, progress = [], Progress()
    with tempfile.TemporaryDirectory() as place:
        for name in (FIRST, *options.model):
            if name not in BUNDLED:
                save_random(name, Path(place, name), BUNDLED["target"], torch.bfloat16, torch.device("cpu"))
        for name, quantization in product(options.model, options.quantization):
            folder = BUNDLED.get(name) or str(Path(place, name))
            command = [sys.executable, "-m", "benchmarks.memory", "--device", options.device]
            done = subprocess.run(
                [*command, "--one", name, folder, quantization, str(Path(place, FIRST))],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            if done.returncode:
                print(f"{name} in {quantization} could not be measured", file=sys.stderr)
                continue
            cases.append(Case(**json.loads(done.stdout.splitlines()[-1])))
            progress.show(f"{len(cases)} measured")
    progress.over()
    print(markdown(cases))
    print(json.dumps([asdict(case) for case in cases]))


if __name__ == "__main__":
    main()
