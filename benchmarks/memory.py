"""Planned and measured memory of models: tables `memory` and `memory-rounds` in docs/models.md.

`OMP_NUM_THREADS=1 python -m benchmarks.memory --write`, then with `--rounds 10`. Each case runs in a new process: a
tiny model of the same form warms up the libraries, then the measured model is loaded and continues a long prompt.
Measured is anonymous memory plus mapped weight files (on an accelerator: tensors); the page cache does not count.
Models other than the bundled pair have random weights. With `--rounds` the bundled pair is loaded, run and unloaded
repeatedly.
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.runs import run_module, traced
from benchmarks.tables import publish, run_study, study_parser
from specdemo.bench.table import Progress
from specdemo.models.memory import device_bytes, peak_device_bytes, release_memory
from specdemo.models.memory_plan import MemoryPlan, plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.quantization import unavailable
from specdemo.models.spec import QUANTIZATIONS, find_device
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe

TABLES = {"memory": "docs/models.md", "memory-rounds": "docs/models.md"}
SAMPLE_INTERVAL_S = 0.002  # of memory usage
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")  # Linux: writing 5 resets the peak
CONTEXT = 1024
PROMPT = "def f():\n"
BUNDLED = {role: getattr(PAIRS["bundled"], role) for role in ("target", "drafter")}
COLUMNS = {
    "model": "{model}",
    "quantization": "{quantization}",
    "planned MB": "{planned_mb:.1f}",
    "measured MB": "{measured_mb:.1f}",
    "error": "{error:+.0%}",
    "planned peak MB": "{planned_peak_mb:.1f}",
    "measured peak MB": "{measured_peak_mb:.1f}",
    "peak error": "{peak_error:+.0%}",
}
ROUND_COLUMNS = {
    "after the first round": "{used_mb[0]:.1f} MB",
    "after the last round": "{last_mb:.1f} MB",
    "growth": "{growth_mb:.1f} MB",
}


def _shape(kind: str, vocab: int, hidden: int, inner: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **others,
    }


_LONG = {"max_position_embeddings": 32768, "rope_theta": 1e6}
_TIED = {"num_key_value_heads": 4, "tie_word_embeddings": True, **_LONG}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-30m": _shape("llama", 4096, 512, 1536, 8, 8, **_TIED),
    "llama-100m": _shape("llama", 4096, 768, 2304, 14, 12, **_TIED),
    "llama-300m": _shape("llama", 4096, 1280, 3840, 16, 20, **{**_TIED, "tie_word_embeddings": False}),
    "qwen2-wide": _shape("qwen2", 151936, 512, 1536, 8, 8, **_TIED),  # mostly embeddings
    "gpt2": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "pythia-70m": _shape("gpt_neox", 50304, 512, 2048, 6, 8, tie_word_embeddings=False, **_LONG),
}
SMALLER = ("llama-30m", "llama-100m")  # measured on request
WARMUP_SHAPE = _shape("qwen2", 4096, 64, 128, 2, 2, num_key_value_heads=1, tie_word_embeddings=True, **_LONG)


def save_random(shape: dict[str, Any], folder: Path) -> None:
    """Save a model with random weights and the bundled tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED["target"]).save_pretrained(folder)


@dataclass(frozen=True)
class Case:
    """Planned and measured bytes of a model, after a run and at the peak."""

    model: str
    quantization: str
    parameters: int
    planned: int
    measured: int
    planned_peak: int
    measured_peak: int

    def record(self) -> dict[str, Any]:
        """Return the fields with derived figures."""
        sizes = ("planned", "measured", "planned_peak", "measured_peak")
        megabytes = {f"{name}_mb": getattr(self, name) / 1e6 for name in sizes}
        errors = {
            "error": self.planned / self.measured - 1,
            "peak_error": self.planned_peak / self.measured_peak - 1,
        }
        return {**asdict(self), **megabytes, **errors}


def measure(name: str, folder: str, quantization: str, device_name: str, warmup: str) -> Case:
    """Load and run a model, after the model in `warmup`; requires a new process."""
    settings: dict[str, Any] = {
        "method": "nasd",
        "temperature": 0.8,
        "ngram_keep": False,
        "max_tokens": 48,
        "device": device_name,
    }
    pool, small = ModelPool(), Recipe(target=warmup, **settings)
    traced(small, PROMPT, pool)
    traced(replace(small, quantization=quantization), PROMPT, pool)
    tokenizer = pool.take(small.target_spec).tokenizer  # shared by all models
    prompt = "x = 1\n" * (CONTEXT // 8)
    recipe = Recipe(target=folder, quantization=quantization, **settings)
    planned = plan_spec(recipe.target_spec.resolved(), len(tokenizer.encode(prompt)) + recipe.max_tokens)
    device = find_device(device_name)
    release_memory()
    before, before_anonymous = used_bytes(device), used_bytes(device, mapped=False)
    with peak_bytes(device) as loading:
        pool.take(recipe.target_spec)
    with peak_bytes(device, files=False) as running:
        traced(recipe, prompt, pool)
    release_memory()
    after = used_bytes(device)
    mapped = after - before - (used_bytes(device, mapped=False) - before_anonymous)
    measured_peak = max(loading[0], running[0]) - before_anonymous + mapped
    sizes = (planned.parameters, resting_bytes(planned), after - before, planned.peak, measured_peak)
    return Case(name, quantization, *sizes)


def resting_bytes(plan: MemoryPlan) -> int:
    """Return the planned bytes after a run."""
    return plan.weights + plan.kv * plan.keeps_kv + plan.settled


def repeated_loading(count: int, device_name: str, quantizations: Sequence[str]) -> Iterator[int]:
    """Yield the used bytes after each of `count` cycles of loading, running and unloading the bundled pair."""
    pool, device = ModelPool(), find_device(device_name)
    for i in range(count + 1):
        for quantization in quantizations:
            if unavailable(quantization, device) is None:
                forms = {"quantization": quantization, "drafter_quantization": quantization, "device": device_name}
                traced(Recipe(max_tokens=32, **forms), PROMPT, pool)
        pool.clear()
        if i:  # the first cycle warms up the libraries
            yield used_bytes(device)


def used_bytes(device: torch.device, mapped: bool = True) -> int:
    """Return the bytes used by this process, including mapped files if `mapped`."""
    if (tensors := device_bytes(device)) is not None:
        return tensors
    memory = psutil.Process().memory_info()
    return memory.rss - (0 if mapped else getattr(memory, "shared", 0))


@contextmanager
def peak_bytes(device: torch.device, files: bool = True) -> Iterator[list[int]]:
    """Yield a list with the peak of used bytes without mapped files, filled on exit.

    If no `files` are mapped meanwhile, the peak of Linux is used, since sampling misses short peaks.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    peak, finished = [used_bytes(device, mapped=False)], threading.Event()

    def sample() -> None:
        while not finished.wait(SAMPLE_INTERVAL_S):
            peak[0] = max(peak[0], used_bytes(device, mapped=False))

    kernel = not files and device.type == "cpu" and CLEAR_REFS.exists()
    sampler = threading.Thread(target=sample, daemon=True)
    if kernel:
        CLEAR_REFS.write_text("5")
    else:
        sampler.start()
    try:
        yield peak
    finally:
        finished.set()
        if kernel:
            kibibytes = re.search(r"VmHWM:\s+(\d+)", STATUS.read_text())
            assert kibibytes is not None
            peak[0] = 1024 * int(kibibytes[1]) - (used_bytes(device) - used_bytes(device, mapped=False))
        else:
            sampler.join()
        peak[0] = max(peak[0], peak_device_bytes(device) or 0)


def study(options: argparse.Namespace) -> None:
    """Measure each case in a new process and publish the table."""
    if options.rounds:
        used_mb = [used / 1e6 for used in repeated_loading(options.rounds, options.device, options.quantization)]
        publish(
            options,
            "memory-rounds",
            ROUND_COLUMNS,
            [{"used_mb": used_mb, "last_mb": used_mb[-1], "growth_mb": used_mb[-1] - used_mb[0]}],
        )
        return
    if options.one:
        name, folder, quantization, warmup = options.one
        print(json.dumps(asdict(measure(name, folder, quantization, options.device, warmup))))
        return
    records, progress = [], Progress()
    with tempfile.TemporaryDirectory() as directory:
        warmup = Path(directory, "warmup")
        save_random(WARMUP_SHAPE, warmup)
        folders = {name: BUNDLED.get(name) or str(Path(directory, name)) for name in options.model}
        for name in options.model:
            if name in SHAPES:
                save_random(SHAPES[name], Path(folders[name]))
        for name, quantization in product(options.model, options.quantization):
            case = ("--one", name, folders[name], quantization, str(warmup))
            try:
                line = run_module("benchmarks.memory", "--device", options.device, *case)
            except subprocess.CalledProcessError:
                print(f"{name} in {quantization} could not be measured", file=sys.stderr)
                continue
            records.append(Case(**json.loads(line)).record())
            progress.show(f"{len(records)} measured")
    progress.over()
    publish(options, "memory", COLUMNS, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    names = [*BUNDLED, *SHAPES]
    parser.add_argument("--model", nargs="+", choices=names, default=[n for n in names if n not in SMALLER])
    parser.add_argument("--quantization", nargs="+", choices=QUANTIZATIONS, default=["none", "bf16", "int8", "nf4"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", nargs=4, metavar=("NAME", "FOLDER", "QUANTIZATION", "WARMUP"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, metavar="N", help="load, run and unload the bundled pair N times instead")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
