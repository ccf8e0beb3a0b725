"""Measure the CUDA path on this machine's GPU: table `gpu_check` (docs/models.md).

`python -m benchmarks.gpu_check --write`. The target has the shape of a Llama of 5.7 billion parameters; its weights are
generated on the GPU in each form. Each part runs in its own process, since a CUDA error ends all CUDA work of a
process; a part that fails leaves a message in the table. `--chat-model FILE` uses a chat model that is not installed.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runs import traced
from benchmarks.tables import Study, publish, study_command
from specdemo.bench.measure import copy_bandwidth, grid, measure
from specdemo.bench.table import table
from specdemo.core.decode import DraftBudget
from specdemo.core.errors import UserError
from specdemo.core.metrics import Metrics
from specdemo.core.sampling import SamplingParams
from specdemo.core.step import Draft, Step
from specdemo.core.theory import expected_tokens
from specdemo.drafters.model import ModelDrafter
from specdemo.models.batch_invariance import Measurement, check_invariance
from specdemo.models.engines.chain_graph import ChainShape
from specdemo.models.engines.cuda_graphs import MAX_ROWS
from specdemo.models.engines.engine import RepeatedPasses
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.engines.native_matrix import NF4_CODES
from specdemo.models.engines.row_linear import RowLinear, int8_linear, kernels_missing, nf4_linear
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
PROMPT = "def mean(values):\n    return "
TIMEOUT_S = 200
DEVICE = "cuda"

Record = dict[str, Any]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def config_of(shape: str) -> LlamaConfig:
    width, inner, layers, heads, kv_heads = SHAPES[shape]
    values = json.loads((Path(PAIRS["bundled"].target) / "config.json").read_text())
    values |= {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "head_dim": width // heads,
    }
    values |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 4096}
    return LlamaConfig.from_dict(values | {"tie_word_embeddings": False, "eos_token_id": None})


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
    """Return the seconds of recorded passes by number of rows."""
    rng, times = random.Random(0), {}
    with closing(CachedModel(model)) as cached:
        tokens = [rng.randrange(cached.vocab_size) for _ in range(STARTED + max(ROWS))]
        cached.prepare(RepeatedPasses(frozenset(ROWS), STARTED, 2 * STARTED))
        for rows in ROWS:
            draft = Draft.chain(tuple(tokens[STARTED : STARTED + rows - 1]))

            def one(draft: Draft = draft) -> None:
                cached.score(tokens[:STARTED], draft)[0, 0].item()

            times[rows] = seconds(
                one, lambda: cached.score(tokens[: STARTED - 1], Draft())
            )  # the last token is not fed
    if model.graph_failure:
        raise UserError(f"capture failed: {model.graph_failure}")
    return times


def form_records(form: str) -> Iterator[Record]:
    """Yield the figures of the large target in a form."""
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
    yield {
        "figure": "one row",
        "ms": 1000 * times[1],
        "share": share,
        "gb": target.weight_bytes / 1e9,
        "bandwidth": bandwidth,
    }
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
    yield {"figure": "memory", "planned": plan.resting, "measured": used}
    result = check_invariance(model, Measurement(seconds=3.0))
    yield {"figure": "bits", "equal": result.equal, "compared": result.compared}
    say(f"{form}: equal bits {result.equal} of {result.compared} rows")
    yield imposed(ar, pool, text)


class ImposedNoise:
    """Random numbers of a chain with which sampling chooses the tokens from position `start` on."""

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self._tokens, self._start = tokens, start

    def write_arrivals(self, out: Tensor, position: int) -> None:
        out.fill_(1.0)
        out[self._tokens[position - self._start]] = 0.0

    def sample(self, probs: Tensor, position: int) -> int:
        return self._tokens[position - self._start]

    def sample_on_device(self, probs: Tensor, position: int) -> Tensor:
        return torch.tensor([self.sample(probs, position)], device=probs.device)


class ImposedDrafter:
    """Draft the tokens of `text` with probability `alpha`, otherwise wrong ones, as a chain that a model samples.

    The model computes all its passes; they are recorded for texts of up to `length` tokens.
    """

    def __init__(self, cached: CachedModel, text: Sequence[int], alpha: float, length: int) -> None:
        self._cached, self._text, self._alpha, self._random = cached, text, alpha, random.Random(0)
        chain = ChainShape(GAMMA, SamplingParams(), cached.vocab_size)
        cached.prepare(RepeatedPasses(frozenset({1, 2}), 1, length + MAX_ROWS, chain))

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        following = self._text[len(tokens) : len(tokens) + budget.limit]
        imposed = [token if self._random.random() < self._alpha else (token + 1) % 256 for token in following]
        noise, cached = ImposedNoise(imposed, len(tokens)), self._cached
        drafter = ModelDrafter(cached.score, SamplingParams(), noise, cached.vocab_size, extend=cached.extend)
        return drafter.propose(tokens, budget.at_most(len(imposed)))

    def observe(self, step: Step) -> None:
        """Ignore the outcome."""


def decoded(recipe: Recipe, pool: ModelPool, drafter: ImposedDrafter | None = None) -> tuple[list[int], Metrics]:
    """Return prompt and text, and the metrics of the run."""
    trace = traced(recipe, PROMPT, pool, drafter=drafter)
    return [*trace.header.prompt_tokens, *trace.tokens], trace.end.metrics


def imposed(ar: Recipe, pool: ModelPool, text: Sequence[int]) -> Record:
    """Compare AR decoding with a draft model whose tokens are accepted with probability `ALPHA`."""
    drafter = loaded("llama-60m", "none")
    pairs = []
    for _ in range(3):
        other = ImposedDrafter(CachedModel(drafter.model), text, ALPHA, len(text))
        found, drafted = decoded(replace(ar, method="nasd", gamma=GAMMA, policy="fixed"), pool, other)
        if found != text:
            say("the texts with and without drafts differ")
        pairs.append((decoded(ar, pool)[1], drafted))
    ratio = statistics.median(after.tokens_per_second / before.tokens_per_second for before, after in pairs)
    say(f"imposed acceptance: {ratio:.2f}")
    single = statistics.median(before.verify_s / before.decode_steps for before, _ in pairs)
    return {
        "figure": "imposed",
        "speedup": ratio,
        "same_text": found == text,
        "expected": expected_tokens(ALPHA, GAMMA),
        "alpha": statistics.mean(after.alpha for _, after in pairs),
        "per_pass": statistics.mean(after.tokens_per_step for _, after in pairs),
        "c": statistics.median(after.draft_s / after.drafted for _, after in pairs) / single,
        "v": statistics.median(after.verify_s / after.decode_steps for _, after in pairs) / single,
    }


def pair_records(pair: str) -> Iterator[Record]:
    """Yield the speed-ups of a pair over AR decoding."""
    default, chat = PAIRS[pair], pair == CHAT_PAIR
    common = {"pair": pair, "device": "cuda", "chat": chat, "max_tokens": 96}
    values = grid([default.method], [default.gamma], [default.policy], [0.0, 1.0])
    recipes = [Recipe(**common, **chosen) for chosen in values]
    prompts = load_prompts(chat=chat)
    prompts = [prompt for prompt in prompts if prompt.kind == prompts[0].kind][:6]
    records = [item for item in measure(recipes, prompts, ModelPool()) if isinstance(item, dict)]
    for row in table(recipes, records):
        same = None if row.same_text is None else f"{row.same_text} of {row.prompts}"
        cost = None if row.c is None else row.c
        say(f"{pair} {row.lane}: {row.tokens_per_second:.0f} tokens/s, speed-up {row.speedup}, c {cost}, same {same}")
        yield {
            "figure": row.lane,
            "tokens_per_second": row.tokens_per_second,
            "speedup": row.speedup,
            "c": cost,
            "v": row.v,
            "same_text": same,
        }


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
    """Run a part in a process of its own."""
    model = ["--chat-model", options.chat_model] if options.chat_model else []
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", name, *model]
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
    """Return the result of a record in words."""
    if error := record.get("error"):
        return str(error)
    if template := FORMATS.get(record["figure"]):
        return template.format(**record)
    words = [f"{record['tokens_per_second']:.0f} tokens/s"]
    words += [f"{name} {record[name]:.2f}" for name in ("speedup", "c", "v") if record.get(name) is not None]
    return ", ".join([*words, f"same text {record['same_text']}"] if record.get("same_text") else words)


def study(options: argparse.Namespace) -> int:
    """Run the parts and publish their figures."""
    if not torch.cuda.is_available():
        print("No GPU is present: nothing was measured.")
        return 0
    if options.chat_model:
        PAIRS[CHAT_PAIR] = replace(PAIRS[CHAT_PAIR], target=options.chat_model)
    if options.only:
        for record in run_part(options.only):
            print(json.dumps(record), flush=True)
        os._exit(0)  # CUDA graphs may not end at the end of a process
    records = []
    for name in options.part:
        say(name)
        records += in_process(name, options)
    rows = [{"part": record["part"], "figure": record["figure"], "result": result(record)} for record in records]
    publish(options, "gpu_check", {name: f"{{{name}}}" for name in ("part", "figure", "result")}, rows)
    return int(any("error" in record for record in records))


OPTIONS = {
    "part": {"nargs": "*", "choices": PARTS, "default": list(PARTS), "help": "parts to run (default: all)"},
    "chat_model": {"metavar": "FILE", "help": "use this file of the chat model"},
    "only": {"choices": PARTS, "help": argparse.SUPPRESS},
}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
