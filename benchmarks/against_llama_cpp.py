"""Speed against llama.cpp and ik_llama.cpp with identical weights: tables `against_llama_cpp*` of the native engine.

`python -m benchmarks.against_llama_cpp --llama-bench PATH [--ik-llama-bench PATH] --write`. Needs `llama-bench` and
`llama-quantize` in one folder and the package `gguf`. `--speculation` compares the speculation of specdemo,
transformers, llama.cpp (`llama-server` in the same folder) and with `--vllm PATH` vLLM on the bundled pair; a gain is
relative to the AR decoding of the same engine. Runs of all programs alternate; all use the threads of torch.
ik_llama.cpp has to be built with the AVX-512 options of its CMake files where the CPU supports them. It is compared in
the stored form of the chat model. The share of the bandwidth counts weights, keys and values in the middle of a run.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import torch
from torch import Tensor

from app import choose_port
from benchmarks.chat_model import save_dequantised
from benchmarks.memory import SHAPES, save_random
from benchmarks.registry import per_width
from benchmarks.runs import traced
from benchmarks.tables import publish, publish_width, run_study, study_parser
from specdemo.bench.measure import measure
from specdemo.bench.table import run_speed
from specdemo.cli.arguments import at_least_one
from specdemo.core.errors import UserError
from specdemo.core.metrics import interval
from specdemo.core.step import Draft
from specdemo.models.engines.engine import Cache, Engine, Entry
from specdemo.models.engines.select import engine_of
from specdemo.models.load import load, reference
from specdemo.models.memory import release_memory
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe

TABLES = {
    **dict.fromkeys((*per_width("against_llama_cpp"), "against_llama_cpp-drafts"), "docs/native-engine.md"),
    "against_llama_cpp-speculation": "docs/performance.md",
}
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
DRAFT_RECIPES = {"ar": {}, "draft": {"gamma": 3}, "nasd": {"gamma": 3}, "suffix": {"gamma": 3}}
DRAFT_COLUMNS = {
    "recipe": "{recipe}",
    "llama.cpp, AR, tokens/s": "{theirs:.0f}",
    "specdemo tokens/s": "{ours:.0f}",
    "ratio": COLUMNS["ratio"],
}
SERVERS = {  # flags of llama-server for each lane
    "AR": (),
    "draft model": (
        "--spec-type",
        "draft-simple",
        "--spec-draft-n-max",
        "3",
        "--spec-draft-p-min",
        "0",
        "-md",
    ),  # and the drafter's file
    "n-grams": ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "3"),
}
VLLM_SERVERS: dict[str, dict[str, Any]] = {  # speculative-config of vllm for each lane
    "AR": {},
    "draft model": {"method": "draft_model", "model": PAIRS["bundled"].drafter, "num_speculative_tokens": 3},
    "n-grams": {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 3},
}
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SPECULATION = {  # lanes by engine: AR, draft model, n-grams
    "specdemo": ("ar", "draft", "nasd"),
    "transformers": ("generate", "assisted constant 0", "prompt lookup 4"),
    "llama.cpp": tuple(SERVERS),
    "vLLM": tuple(VLLM_SERVERS),
}
SPECULATION_COLUMNS = {
    "engine": "{engine}",
    "method": "{method}",
    "tokens/s": "{speed:.0f}",
    "accepted / drafted": "{acceptance}",
    "gain over its AR": "{gain:.2f} [{low:.2f}, {high:.2f}]",
    "slower than its AR": "{losing} of {prompts}",
    "same text as specdemo's AR": "{same} of {prompts}",
}
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


def write_gguf(model: Any, path: Path, tokenizer: Any = None) -> None:
    """Write the float32 weights of a Llama, with the vocabulary of a byte-level tokenizer if given."""
    from gguf import GGUFWriter

    config, body = model.config, model.model
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        _add_vocabulary(writer, tokenizer)

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


def _add_vocabulary(writer: Any, tokenizer: Any) -> None:
    """Add texts of ids and merges; encoding differs in spaces and lines, so prompts must be token ids."""
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids)
    writer.add_token_types([3 if token in special else 1 for token in range(len(tokenizer))])  # control, normal
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)


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
        if name == "bundled":
            publish(options, "against_llama_cpp-drafts", DRAFT_COLUMNS, compare_drafts(full, options))
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


def compare_drafts(file: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare greedy runs of the bundled pair on code prompts with AR decoding by llama.cpp of its target `file`."""
    pool, pairs = ModelPool(), {name: [] for name in DRAFT_RECIPES}
    prompts = [prompt.text for prompt in load_prompts(("code",))]
    common = {"pair": "bundled", "temperature": 0.0, "max_tokens": options.tokens, "device": "cpu"}
    for i in range(options.rounds + 1):
        theirs = their_speed(options.llama_bench, file, options.tokens, Cell(0, False))
        for name, values in DRAFT_RECIPES.items():
            run = traced(Recipe(method=name, **common, **values), prompts[i % len(prompts)], pool)
            pairs[name].append((run.metrics["tokens_per_second"], theirs))
    return [{"recipe": name, **_figures(found[1:])} for name, found in pairs.items()]  # without warm-up


@contextmanager
def llama_servers(program: Path, target: Path, drafter: Path) -> Iterator[list[str]]:
    """Run a server per lane of `SERVERS`; yield their addresses as values of `external`."""
    commands = []
    for flags in SERVERS.values():
        files = ["-m", target, *flags, *([drafter] if flags[-1:] == ("-md",) else [])]
        commands.append([program, *files, "-t", torch.get_num_threads(), "-np", 1, "-c", 2048])
    with _servers("llama.cpp", commands) as addresses:
        yield addresses


@contextmanager
def vllm_servers(program: Path | None, target: str) -> Iterator[list[str]]:
    """Run a server per lane of `VLLM_SERVERS`; yield their addresses, none without a program."""
    counts = ["--per-request-spec-decode-metrics", "detailed"]
    memory = ["--gpu-memory-utilization", 0.1]  # of the CPU's memory; three servers run
    common = ["--dtype", "float32", "--max-model-len", 1024, "--enforce-eager", "--host", "127.0.0.1", *memory]
    speculation = [
        ["--speculative-config", json.dumps(config), *counts] if config else [] for config in VLLM_SERVERS.values()
    ]
    commands = [[program, "serve", target, *common, *flags] for flags in speculation] if program else []
    with _servers("vllm", commands) as addresses:
        yield addresses


@contextmanager
def _servers(engine: str, commands: Sequence[Sequence[Any]]) -> Iterator[list[str]]:
    """Start the programs one after another, each with a port of its own; stop them at the end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")} | VLLM_ENVIRONMENT
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # of vLLM; an argument of llama.cpp
    addresses = []
    with ExitStack() as opened:
        for command in commands:
            port = choose_port("127.0.0.1", None)
            process = subprocess.Popen(
                [*map(str, command), "--port", str(port)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            opened.callback(process.wait)
            opened.callback(process.terminate)
            _wait_until_ready(f"http://127.0.0.1:{port}/health", process)
            addresses.append(f"{engine}=http://127.0.0.1:{port}")
        yield addresses


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with suppress(OSError), urlopen(url):
            return
        time.sleep(0.2)
    raise UserError(f"the server ended with code {process.returncode}: run its command to see the cause")


def compare_speculation(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run draft models and n-grams of several engines on the same weights, prompts and threads, in shuffled order."""
    pair, server = PAIRS["bundled"], options.llama_bench.with_name("llama-server")
    common = {"pair": "bundled", "temperature": 0.0, "max_tokens": options.tokens}
    here = {**common, "device": "cpu", "dtype": "float32"}
    prompts = load_prompts(("code",))[: options.prompts]
    with tempfile.TemporaryDirectory() as place:
        files = {}
        for role, folder in (("target", pair.target), ("drafter", pair.drafter)):
            files[role] = Path(place) / f"{role}.gguf"
            model, tokenizer = reference(ModelSpec(str(folder), dtype="float32", device="cpu"))
            write_gguf(model, files[role], tokenizer)
        with (
            llama_servers(server, files["target"], files["drafter"]) as llama_addresses,
            vllm_servers(options.vllm, pair.target) as vllm_addresses,
        ):
            recipes = [replace(Recipe(), **here, method=method, gamma=3) for method in SPECULATION["specdemo"]]
            recipes += [Recipe(**common, external=address) for address in (*llama_addresses, *vllm_addresses)]
            baselines = SPECULATION["transformers"]
            records = [
                item
                for item in measure(recipes, prompts, ModelPool(), baselines, repeat=options.rounds)
                if isinstance(item, dict)
            ]
    engines = ("specdemo", "llama.cpp", *(["vLLM"] if options.vllm else []), "transformers")
    lanes = [(engine, method) for engine in engines for method in SPECULATION[engine]]
    return speculation_records(lanes, records)


def speculation_records(lanes: Sequence[tuple[str, str]], records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per lane; the first lane of an engine is its AR decoding, the first of all the reference text."""
    rows = []
    for i, (engine, method) in enumerate(lanes):
        own = next(j for j, lane in enumerate(lanes) if lane[0] == engine)
        runs = [(record["runs"][i], record["runs"][own], record["runs"][0]) for record in records]
        gains = [run_speed(run) / run_speed(ar) for run, ar, _ in runs]
        drafted = sum(run.get("drafted", 0) for run, _, _ in runs)
        low, high = interval(gains)
        rows.append(
            {
                "engine": engine,
                "method": method,
                "speed": statistics.median(run_speed(run) for run, _, _ in runs),
                "acceptance": f"{sum(run['accepted'] for run, _, _ in runs) / drafted:.2f}" if drafted else "",
                "gain": statistics.median(gains),
                "low": low,
                "high": high,
                "losing": sum(gain < 1 for gain in gains),
                "same": sum(run["text"] == reference["text"] for run, _, reference in runs),
                "prompts": len(runs),
            }
        )
    return rows


def study(options: argparse.Namespace) -> None:
    """Compare all models, forms and contexts and publish the table."""
    for name in ("rounds", "tokens"):
        at_least_one(name, getattr(options, name))
    if not options.llama_bench.is_file():
        raise UserError(f"{options.llama_bench} is not a file: build llama.cpp and pass --llama-bench PATH")
    for path in filter(None, (options.llama_bench, options.ik_llama_bench, options.vllm)):
        options.command = options.command.replace(str(path), "PATH")
    if options.speculation:
        return publish(options, "against_llama_cpp-speculation", SPECULATION_COLUMNS, compare_speculation(options))
    records = []
    for name in options.model:
        if name == "bundled":
            records += compare(name, PAIRS["bundled"].target, options)
            continue
        if name == CHAT_PAIR:
            with tempfile.TemporaryDirectory() as folder:
                save_dequantised(Path(folder))
                path = Path(PAIRS[name].target)
                records += compare_form(name, "stored", "Q4_1", ModelSpec(str(path), device="cpu"), path, options)
                records += compare(name, folder, options)
            continue
        with tempfile.TemporaryDirectory() as folder:
            save_random(SHAPES[name], Path(folder))
            records += compare(name, folder, options)
    publish_width(options, "against_llama_cpp", COLUMNS, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--llama-bench", type=Path, required=True, metavar="PATH")
    parser.add_argument("--ik-llama-bench", type=Path, metavar="PATH")
    parser.add_argument(
        "--model", nargs="+", default=["bundled", "llama-300m", CHAT_PAIR], choices=["bundled", CHAT_PAIR, *SHAPES]
    )
    parser.add_argument("--form", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--context", nargs="+", type=int, default=[0, 512, 2048])
    parser.add_argument("--prompt", nargs="+", type=int, default=[512, 2048, 4500])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speculation", action="store_true", help="compare speculation instead")
    parser.add_argument("--vllm", type=Path, metavar="PATH", help="program of vLLM, a further engine of --speculation")
    parser.add_argument("--prompts", type=int, default=6, help="prompts of --speculation (default: %(default)s)")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
