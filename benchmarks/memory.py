"""Measured and estimated memory of models: table `memory` in docs/models.md.

`OMP_NUM_THREADS=1 python -m benchmarks.memory --write`. Each case runs in a new process, after the bundled drafter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runs import SHAPES, in_new_process, save_random
from benchmarks.tables import Study, publish, study_command
from specdemo.core.step import Draft
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load
from specdemo.models.memory import process_bytes, release_memory
from specdemo.models.memory_plan import plan_spec
from specdemo.models.spec import ModelSpec, is_gguf
from specdemo.models.zoo import CHAT_PAIR, PAIRS

TABLES = {"memory": "docs/models.md"}
FIGURES = {"estimated MB": "{estimated:.1f}", "measured MB": "{measured:.1f}", "measured / estimated": "{ratio:.2f}"}


def measure(model: str, name: str, form: str, context: int) -> dict[str, Any]:
    CachedModel(load(ModelSpec(PAIRS["bundled"].drafter or "", quantization=form, device="cpu")).model).read([1] * 64)
    spec = ModelSpec(name, quantization=form, device="cpu").resolved()
    estimated = plan_spec(spec, context).after_run / 1e6
    release_memory()
    before = process_bytes()
    cached = CachedModel(load(spec).model)
    cached.score([i % cached.vocab_size for i in range(context)], Draft())
    release_memory()
    used = (process_bytes() - before) / 1e6
    return {"model": model, "form": form, "estimated": estimated, "measured": used, "ratio": used / estimated}


def memory(options: argparse.Namespace) -> None:
    """Measure the bundled models, the chat model and a random Llama, stored in bfloat16, in each form."""
    names = {"target": PAIRS["bundled"].target, "drafter": PAIRS["bundled"].drafter, CHAT_PAIR: PAIRS[CHAT_PAIR].target}
    with tempfile.TemporaryDirectory() as folder:
        save_random(SHAPES["llama-30m"], Path(folder))
        records = [
            in_new_process(measure, model, name, form, options.context)
            for model, name in {**names, "llama-30m": folder}.items()
            if name
            for form in (("none", "bf16") if is_gguf(name) else ("none", "bf16", "int8", "nf4"))
        ]
    publish(options, "memory", {"model": "{model}", "form": "{form}"} | FIGURES, records)


main = study_command(__file__, __doc__, TABLES, Study(memory, {"context": 1024}))

if __name__ == "__main__":
    sys.exit(main())
