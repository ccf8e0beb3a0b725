"""Speed against llama.cpp and ik_llama.cpp with identical weights: tables `against_llama_cpp*` of the native engine.

`python -m benchmarks.against_llama_cpp --llama-bench PATH [--ik-llama-bench PATH] --write`. Needs `llama-bench` and
`llama-quantize` in one folder and the package `gguf`. Runs of all programs alternate; all use the threads of torch.
ik_llama.cpp has to be built with the AVX-512 options of its CMake files where the CPU supports them. It is compared in
the stored form of the chat model. The share of the bandwidth counts weights, keys and values in the middle of a run.
Speculation of other engines is measured by `specdemo bench --external ENGINE=URL`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.registry import per_width
from benchmarks.study_models import save_dequantised
from benchmarks.tables import Study, publish_width, study_command
from specdemo.cli.arguments import at_least_one
from specdemo.core.errors import UserError
from specdemo.core.metrics import interval
from specdemo.core.step import Draft
from specdemo.models.engines.engine import Cache, Engine, Entry
from specdemo.models.engines.select import engine_of
from specdemo.models.load import load, reference
from specdemo.models.memory import release_memory
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS

TABLES = dict.fromkeys(per_width("against_llama_cpp"), "docs/native-engine.md")
FORMS = {  # dtype and quantization here, type of llama-quantize
    "float32": ("float32", "none", "F32"),
    "bfloat16": ("bfloat16", "none", "BF16"),
    "int8": ("bfloat16", "int8", "Q8_0"),
    "nf4": ("bfloat16", "nf4", "Q4_0"),
}
COLUMNS = {
    "model": "{model}",
    "form": "{form} / {kind}",
    "cell": "{cell}",
    "llama.cpp tokens/s": "{theirs:.0f}",
    "specdemo tokens/s": "{ours:.0f}",
    "ratio": "{ratio:.2f} [{low:.2f}, {high:.2f}]",
    "bandwidth": "{share}",
    "ratio to ik_llama.cpp": "{ik}",
}
READ_BYTES = 512 << 20
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Any, path: Path) -> None:
    """Write the float32 weights of a Llama."""
    from gguf import GGUFWriter

    config, body = model.config, model.model
    writer = GGUFWriter(path, "llama")
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    for key, size in sizes.items():
        getattr(writer, f"add_{key}")(size)
    writer.add_tokenizer_model("none")

    def add(name: str, weight: Tensor) -> None:
        writer.add_tensor(f"{name}.weight", weight.detach().float().contiguous().numpy())

    add("token_embd", body.embed_tokens.weight)
    add("output_norm", body.norm.weight)
    if model.lm_head.weight is not body.embed_tokens.weight:
        add("output", model.lm_head.weight)
    for i, layer in enumerate(body.layers):
        for ours, theirs in _LAYER_NAMES.items():
            weight = layer.get_submodule(ours).weight
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            add(f"blk.{i}.{theirs}", weight if heads is None else _interleaved(weight, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Place the components of each rotation next to each other, as llama.cpp expects them."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


class Cell(NamedTuple):
    """Decoding after `length` tokens, or reading a prompt of `length` tokens."""

    length: int
    is_prompt: bool

    def __str__(self) -> str:
        return f"{'prompt' if self.is_prompt else 'context'} {self.length:,}"


def their_speed(program: Path, file: Path, tokens: int, cell: Cell, is_ik: bool = False) -> float:
    """Return tokens/s of AR decoding, or of reading a prompt, with llama-bench."""
    if cell.is_prompt:
        work = ["-p", str(cell.length), "-n", "0"]
    elif is_ik and cell.length:
        work = ["-p", "0", "-n", "0", "-gp", f"{cell.length},{tokens}"]
    else:
        work = ["-p", "0", "-n", str(tokens), *([] if is_ik else ["-d", str(cell.length)])]
    counts = [*work, "-r", "1", "-t", str(torch.get_num_threads())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}  # its defaults
    command = [program, "-m", file, *counts, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    if done.returncode:
        raise UserError(f"{program.name} failed ({done.stderr.strip().splitlines()[-1:]}): check the build")
    return float(json.loads(done.stdout)[-1]["avg_ts"])


def our_speed(engine: Engine[Any], cache: Cache, vocab: int, tokens: int, cell: Cell) -> float:
    """Return passes/s of single rows with greedy choice of the next token, or tokens/s of reading a prompt."""
    cache.keep(0)
    token, held = 1, cell.length
    start = time.perf_counter()
    if held:
        engine.run([Entry(cache, [i % vocab for i in range(held)], 0, Draft())])
    if cell.is_prompt:
        return held / (time.perf_counter() - start)
    start = time.perf_counter()
    for i in range(tokens):
        token = int(engine.run([Entry(cache, [token], held + i, Draft())])[0][0].argmax())
    return tokens / (time.perf_counter() - start)


def compare(name: str, folder: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all forms and contexts of a model in alternation."""
    records = []
    with tempfile.TemporaryDirectory() as place:
        full = Path(place) / "f32.gguf"
        model, _ = reference(ModelSpec(folder, dtype="float32", device="cpu"))
        write_gguf(model, full)
        del model
        for form in options.form:
            dtype, quantization, kind = FORMS[form]
            file = full
            if kind != "F32":
                file = Path(place) / f"{kind}.gguf"
                quantizer = options.llama_bench.with_name("llama-quantize")
                subprocess.run([quantizer, full, file, kind], capture_output=True, check=True)
            spec = ModelSpec(folder, dtype=dtype, quantization=quantization, device="cpu")
            records += compare_form(name, form, kind, spec, file, options)
    return records


def compare_form(
    name: str, form: str, kind: str, spec: ModelSpec, file: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure `spec` and `file`, which contain the same weights, at all contexts in alternation."""
    release_memory()
    loaded, records = load(spec), []
    engine = engine_of(loaded.model)
    cache, memory = engine.open(), torch.ones(READ_BYTES // 4)
    ik = options.ik_llama_bench if form == "stored" else None
    for cell in (*(Cell(n, False) for n in options.context), *(Cell(n, True) for n in options.prompt)):
        speeds, ik_ratios, shares = [], [], []
        for _ in range(options.rounds):
            theirs = their_speed(options.llama_bench, file, options.tokens, cell)
            ours = our_speed(engine, cache, loaded.vocab_size, options.tokens, cell)
            speeds.append((ours, theirs))
            start = time.perf_counter()
            memory.sum()
            bandwidth = READ_BYTES / (time.perf_counter() - start)
            cache.keep(cell.length + options.tokens // 2)
            shares.append((engine.weight_bytes + cache.kv_bytes) * ours / bandwidth)
            if ik:
                ik_ratios.append(ours / their_speed(ik, file, options.tokens, cell, is_ik=True))
        share = "" if cell.is_prompt else f"{statistics.median(shares):.2f}"
        ratio = "{:.2f} [{:.2f}, {:.2f}]".format(statistics.median(ik_ratios), *interval(ik_ratios)) if ik else ""
        record = {"model": name, "form": form, "kind": kind, "cell": str(cell), "share": share, "ik": ratio}
        records.append(record | _figures(speeds))
        print(COLUMNS["ratio"].format(**records[-1]), form, cell, share, ratio, file=sys.stderr, flush=True)
    return records


def _figures(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    ours, theirs = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratios = [own / other for own, other in pairs]
    low, high = interval(ratios)
    return {"ours": ours, "theirs": theirs, "ratio": statistics.median(ratios), "low": low, "high": high}


def study(options: argparse.Namespace) -> None:
    """Compare all models, forms and contexts and publish the table."""
    for name in ("rounds", "tokens"):
        at_least_one(name, getattr(options, name))
    if not options.llama_bench.is_file():
        raise UserError(f"{options.llama_bench} is not a file: build llama.cpp and pass --llama-bench PATH")
    for path in filter(None, (options.llama_bench, options.ik_llama_bench)):
        options.command = options.command.replace(str(path), "PATH")
    records = []
    for name in options.model:
        if name == "bundled":
            records += compare(name, PAIRS["bundled"].target, options)
            continue
        with tempfile.TemporaryDirectory() as folder:
            save_dequantised(Path(folder))
            path = Path(PAIRS[name].target)
            records += compare_form(name, "stored", "Q4_1", ModelSpec(str(path), device="cpu"), path, options)
            records += compare(name, folder, options)
    publish_width(options, "against_llama_cpp", COLUMNS, records)


OPTIONS = {
    "llama_bench": {"type": Path, "required": True, "metavar": "PATH"},
    "ik_llama_bench": {"type": Path, "metavar": "PATH"},
    "model": {"nargs": "+", "default": ["bundled", CHAT_PAIR], "choices": ["bundled", CHAT_PAIR]},
    "form": {"nargs": "+", "default": list(FORMS), "choices": FORMS},
    "context": [0, 512, 2048],
    "prompt": [512, 2048, 4500],
    "tokens": 128,
    "rounds": 5,
}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
