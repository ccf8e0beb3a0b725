"""Passes of a target with the shapes of SmolLM2 1.7B, and the speed-up that they predict with the 135M drafter.

`python -m benchmarks.larger_target --write`: tables `larger_target` and `larger_target-gain` in docs/native-engine.md.
The weights are random, since only the time of a pass is measured; the acceptance rate is an assumption.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from benchmarks.native_passes import READ_BYTES, a_pass, filled, seconds
from benchmarks.tables import publish, run_study, study_parser
from specdemo.cli.arguments import at_least_one
from specdemo.core.errors import UserError
from specdemo.core.theory import expected_tokens, speedup
from specdemo.models.engines.native import NativeEngine
from specdemo.models.engines.select import engine_of
from specdemo.models.load import load
from specdemo.models.memory import release_memory
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS

TABLES = dict.fromkeys(("larger_target", "larger_target-gain"), "docs/native-engine.md")
FORMS = {"Q4_1": GGMLQuantizationType.Q4_1, "Q8_0": GGMLQuantizationType.Q8_0}
VOCABULARY, WIDTH, INNER, LAYERS, HEADS, POSITIONS = 49152, 2048, 8192, 24, 32, 2048
ACCEPTANCES = (50, 60, 70, 80, 90)  # percent
SCALE = 0.002  # of the random integers


def save_random(path: Path, form: GGMLQuantizationType, tokenizer_file: Path) -> None:
    """Write a GGUF file with random weights in `form` and the tokenizer of another file."""
    random, writer = np.random.default_rng(0), GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(130000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    for name, field in GGUFReader(tokenizer_file).fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)

    def matrix(name: str, outputs: int, inputs: int) -> None:
        group, size = GGML_QUANT_SIZES[form]
        blocks = random.integers(0, 256, (outputs, inputs // group, size), dtype=np.uint8)
        numbers = 2 if form == GGMLQuantizationType.Q4_1 else 1  # scale and minimum, or scale
        blocks[..., : 2 * numbers] = np.array([SCALE, -8 * SCALE][:numbers], np.float16).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(outputs, -1), raw_dtype=form)

    def gain(name: str) -> None:
        writer.add_tensor(name, np.ones(WIDTH, np.float32))

    matrix("token_embd.weight", VOCABULARY, WIDTH)
    gain("output_norm.weight")
    for i in range(LAYERS):
        gain(f"blk.{i}.attn_norm.weight")
        gain(f"blk.{i}.ffn_norm.weight")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{i}.{part}.weight", WIDTH, WIDTH)
        matrix(f"blk.{i}.ffn_gate.weight", INNER, WIDTH)
        matrix(f"blk.{i}.ffn_up.weight", INNER, WIDTH)
        matrix(f"blk.{i}.ffn_down.weight", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def native_engine(path: Path) -> NativeEngine:
    """Load a GGUF file. Raises `UserError` if another engine runs it."""
    engine = engine_of(load(ModelSpec(str(path), device="cpu")).model)
    if not isinstance(engine, NativeEngine):
        raise UserError("the native engine is not available: install a C compiler")
    return engine


def medians(actions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median seconds of each action, measured in turn."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, list_of in zip(actions, times, strict=True):
            action()
            list_of.append(seconds(action))
    return [statistics.median(list_of) for list_of in times]


def predicted(times: Sequence[float], draft_s: float) -> dict[str, str]:
    """Return the best speed-up and its draft length per acceptance; `times`: seconds of passes over 1, 2, ... rows."""
    gains = {}
    for percent in ACCEPTANCES:
        alpha, c = percent / 100, draft_s / times[0]
        speeds = [speedup(expected_tokens(alpha, n), n, c, times[n] / times[0]) for n in range(1, len(times))]
        best = int(np.argmax(speeds))
        gains[f"alpha_{percent}"] = f"{speeds[best]:.2f} ({best + 1})"
    return gains


def measure(engine: NativeEngine, drafter: NativeEngine, context: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of passes of both models after `context` positions."""
    memory, cache, draft_cache = torch.ones(READ_BYTES // 4), filled(engine, context), filled(drafter, context)
    passes = [a_pass(engine, cache, context, rows) for rows in range(1, max(options.rows) + 1)]
    read, draft_s, *times = medians([memory.sum, a_pass(drafter, draft_cache, context, 1), *passes], options.rounds)
    cache.keep(context)
    least = (engine.weight_bytes + cache.kv_bytes) * read / READ_BYTES
    engine.close(cache)
    drafter.close(draft_cache)
    rows = {f"rows_{n}": f"{1000 * times[n - 1]:.1f} ({times[n - 1] / times[0]:.2f})" for n in options.rows}
    return {
        "context": context,
        "gb": engine.weight_bytes / 1e9,
        "bandwidth": READ_BYTES / read / 1e9,
        "share": times[0] / least,
        "c": draft_s / times[0],
        **rows,
        **predicted(times, draft_s),
    }


def study(options: argparse.Namespace) -> None:
    """Measure passes of both models and publish the predicted speed-ups."""
    at_least_one("rounds", options.rounds)
    chat_file, records = Path(PAIRS[CHAT_PAIR].target), []
    drafter = native_engine(chat_file)
    for form in options.form:
        release_memory()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "target.gguf"
            save_random(path, FORMS[form], chat_file)
            engine = native_engine(path)
        records += [{"form": form, **measure(engine, drafter, context, options)} for context in options.context]
    columns = {"form": "{form}", "weights GB": "{gb:.2f}", "context": "{context}", "read GB/s": "{bandwidth:.0f}"}
    columns |= {"one row / B": "{share:.2f}", **{f"{n} rows, ms": f"{{rows_{n}}}" for n in options.rows}}
    publish(options, "larger_target", columns, records)
    columns = {"form": "{form}", "context": "{context}", "c": "{c:.3f}"}
    columns |= {f"alpha {percent / 100}": f"{{alpha_{percent}}}" for percent in ACCEPTANCES}
    publish(options, "larger_target-gain", columns, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--context", nargs="+", type=int, default=[64, 1500])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 3, 5, 8, 16])
    parser.add_argument("--rounds", type=int, default=9)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
