"""The chat model in several forms: tables `chat-equality`, `chat-activations`, `chat-forms` and `chat-drafters`.

`python -m benchmarks.chat_model --write`. The form `Q4_1` is the stored file; the others are converted from its
dequantised weights. Greedy texts are compared with `transformers` in float32, and with llama.cpp (8-bit activations) if
`--llama-completion PATH` is given.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.runs import traced
from benchmarks.tables import ROOT, publish, run_study, study_parser
from specdemo.cli.arguments import at_least_one
from specdemo.core.errors import UserError
from specdemo.core.metrics import interval
from specdemo.models.kv_cache import CachedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ACTIVATION_BITS
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import Prompt, alternate_classes, load_prompts
from specdemo.recipe import Recipe

MODELS = "docs/models.md"
TABLES = dict.fromkeys(("chat-equality", "chat-activations", "chat-forms", "chat-drafters"), MODELS)
STORED = "Q4_1"
FORMS = {"float32": ("float32", "none"), "bf16": ("bfloat16", "none"), "int8": ("auto", "int8"), "nf4": ("auto", "nf4")}
DRAFTERS = ("int8", "nf4")
GAMMA = 4
CONTEXT = 1024  # tokens of a document
EQUALITY_COLUMNS = {
    "reference": "{reference}",
    "prompts": "{prompts}",
    "tokens": "{tokens:,}",
    "equal texts": "{equal}",
    "margins of the logits at the first differences": "{margins}",
}
ACTIVATION_COLUMNS = {
    "activations": "{bits} bits",
    "text": "{text}",
    "tokens": "{tokens:,}",
    "perplexity": "{perplexity:.3f}",
    "change": "{change:+.2%}",
    "KL divergence": "{divergence:.5f}",
    "other most probable token": "{differing:.1%}",
}
FORM_COLUMNS = {
    "form": "{form}",
    "weights MB": "{mb:.0f}",
    "perplexity, documents": "{documents:.2f}",
    "perplexity, answers": "{answers:.2f}",
    "tokens/s": "{speed:.0f}",
    "relative to Q4_1": "{ratio}",
}
DRAFTER_COLUMNS = {
    "drafter of bf16": "{drafter}",
    "temperature": "{temperature:g}",
    "alpha": "{alpha:.2f}",
    "tokens/pass": "{tokens_per_pass:.2f}",
    "relative to bf16": "{to_bf16}",
    "relative to Q4_1": "{to_stored}",
}


Texts: TypeAlias = list[tuple[list[int], int]]  # tokens, and the number of the first predicted token


@dataclass(frozen=True)
class Forms:
    """Folder of the dequantised checkpoint, and a pool."""

    folder: Path
    pool: ModelPool

    def recipe(self, form: str, **values: Any) -> Recipe:
        """Return a chat recipe for a target in `form`."""
        common = {"chat": True, "top_p": 1.0, "device": "cpu", **values}
        if form == STORED:
            return replace(Recipe(), pair=CHAT_PAIR, **common)
        dtype, quantization = FORMS[form]
        return replace(Recipe(), target=str(self.folder), dtype=dtype, quantization=quantization, **common)


def save_dequantised(folder: Path) -> None:
    """Write the chat model as a checkpoint in float32. Raises `UserError` if it is not installed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if PAIRS[CHAT_PAIR].missing:
        raise UserError(f"the chat model is not installed: {PAIRS[CHAT_PAIR].missing}")
    file = Path(PAIRS[CHAT_PAIR].target)
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del read.config.quantization_config  # otherwise it cannot be saved
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(folder)


def chosen_prompts(count: int) -> list[Prompt]:
    """Return `count` prompts of alternating classes."""
    return alternate_classes(load_prompts(chat=True))[:count]


def equality(forms: Forms, prompts: Sequence[Prompt], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare greedy texts of the stored form with `transformers`, and with llama.cpp."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(forms.folder, dtype=torch.float32).eval()
    program = options.llama_completion
    margins: dict[str, list[float | None]] = {"transformers, float32": [], **({"llama.cpp": []} if program else {})}
    total = 0
    for prompt in prompts:
        recipe = forms.recipe(STORED, method="nasd", temperature=0.0, max_tokens=options.max_tokens)
        trace = traced(recipe, prompt.text, forms.pool)
        tokenizer = forms.pool.take(recipe.target_spec).tokenizer
        start = list(trace.header.prompt_tokens)
        total += len(trace.tokens)
        ids = torch.tensor([start])
        common = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        theirs = [oracle.generate(ids, max_new_tokens=len(trace.tokens), **common)[0, len(start) :].tolist()]
        if program:
            text = llama_cpp_text(program, tokenizer.decode(start), options.max_tokens)
            theirs.append(tokenizer.encode(text, add_special_tokens=False))
        for name, tokens in zip(margins, theirs, strict=True):
            ours = [token for token in trace.tokens if token in tokens or token not in tokenizer.all_special_ids]
            margins[name].append(margin(oracle, start, ours, tokens))
            print(prompt.name, name, margins[name][-1], file=sys.stderr, flush=True)
    records = []
    for name, found in margins.items():
        differences = sorted(value for value in found if value is not None)
        shown = ", ".join(f"{value:.3f}" for value in differences) or "-"
        counts = {"prompts": len(prompts), "tokens": total, "equal": len(prompts) - len(differences)}
        records.append({"reference": name, **counts, "margins": shown})
    return records


def margin(oracle: Any, start: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float | None:
    """Return the difference of the two largest logits at the first different token, `None` for equal texts."""
    first = next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
    if first is None:
        return None
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*start, *ours[:first]]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    return best - second


def llama_cpp_text(program: Path, prompt: str, tokens: int) -> str:
    """Return the greedy continuation of `prompt`. Raises `UserError` if the program fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(prompt + "\n")  # the program removes one
        file.flush()
        command = [program, "-m", PAIRS[CHAT_PAIR].target, "-f", file.name, "-n", str(tokens), "--temp", "0", "-no-cnv"]
        command += ["--no-display-prompt", "--no-escape", "--no-warmup", "-t", str(torch.get_num_threads())]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise UserError(f"{program.name} failed ({done.stderr.strip().splitlines()[-1:]}): check the build")
    text, ended, _ = done.stdout.rpartition(" [end of text]")
    return text if ended else done.stdout.removesuffix("\n\n")


def perplexity(model: CachedModel, texts: Texts) -> float:
    """Return exp of the mean cross entropy of each text after its first tokens."""
    nats, count = 0.0, 0
    for text, start in texts:
        logits = model.read(text)[start - 1 : -1].float().log_softmax(-1)
        nats -= float(logits.gather(1, torch.tensor(text[start:])[:, None]).sum())
        count += len(text) - start
    return math.exp(nats / count)


def documents(tokenizer: Any) -> Texts:
    """Return the first tokens of the documents of the program."""
    paths = sorted(ROOT.glob("docs/*.md"))
    return [(tokenizer.encode(path.read_text("utf-8"))[:CONTEXT], 1) for path in paths]


def sampled_answers(pool: ModelPool, prompts: Sequence[Prompt], tokens: int) -> Texts:
    """Return answers of the stored form at temperature 1."""
    recipe = Recipe(pair=CHAT_PAIR, chat=True, top_p=1.0, device="cpu", method="ar", temperature=1.0, max_tokens=tokens)
    runs = (traced(recipe, prompt.text, pool) for prompt in prompts)
    return [([*run.header.prompt_tokens, *run.tokens], len(run.header.prompt_tokens)) for run in runs]


def measure_activations(prompts: Sequence[Prompt], tokens: int) -> list[dict[str, Any]]:
    """Compare the distributions of all widths of activations with those of the first width."""
    pool = ModelPool()
    target = Recipe(pair=CHAT_PAIR, method="ar", device="cpu").target_spec
    models = {bits: pool.take(replace(target, activations=bits)) for bits in ACTIVATION_BITS}
    first = next(iter(models.values()))
    texts = {"documents": documents(first.tokenizer), "answers": sampled_answers(pool, prompts, tokens)}
    records: list[dict[str, Any]] = []
    for name, samples in texts.items():
        totals = {bits: [0.0, 0.0, 0.0] for bits in models}  # nats, divergence, differing tokens
        for text, start in samples:
            rows = {
                bits: CachedModel(loaded.model).read(text)[start - 1 : -1].float().log_softmax(-1)
                for bits, loaded in models.items()
            }
            exact, following = next(iter(rows.values())), torch.tensor(text[start:])[:, None]
            for bits, logs in rows.items():
                totals[bits][0] -= float(logs.gather(1, following).sum())
                totals[bits][1] += float((exact.exp() * (exact - logs)).sum())
                totals[bits][2] += float((exact.argmax(-1) != logs.argmax(-1)).sum())
        count = sum(len(text) - start for text, start in samples)
        base = math.exp(next(iter(totals.values()))[0] / count)
        for bits, (nats, divergence, differing) in totals.items():
            perplexity = math.exp(nats / count)
            figures = {"perplexity": perplexity, "change": perplexity / base - 1, "divergence": divergence / count}
            records.append({"bits": bits, "text": name, "tokens": count, "differing": differing / count, **figures})
    return records


def measure_forms(forms: Forms, prompts: Sequence[Prompt], tokens: int) -> list[dict[str, Any]]:
    """Return size, perplexity and AR speed of every form."""
    names = [STORED, *FORMS]
    answers = sampled_answers(forms.pool, prompts, tokens)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    records = {}
    for name in names:
        loaded = forms.pool.take(forms.recipe(name, method="ar").target_spec)
        scorer = CachedModel(loaded.model)
        records[name] = {
            "form": name,
            "mb": loaded.weight_bytes / 1e6,
            "documents": perplexity(scorer, documents(loaded.tokenizer)),
            "answers": perplexity(scorer, answers),
        }
    for prompt in (prompts[0], *prompts):
        for name in names:
            run = traced(forms.recipe(name, method="ar", temperature=0.0, max_tokens=tokens), prompt.text, forms.pool)
            speeds[name].append(run.metrics["tokens_per_second"])
    for name in names:
        measured, stored = speeds[name][1:], speeds[STORED][1:]  # without warm-up
        records[name] |= {"speed": statistics.median(measured), "ratio": _ratio(measured, stored)}
    return list(records.values())


def measure_drafters(forms: Forms, prompts: Sequence[Prompt], tokens: int) -> list[dict[str, Any]]:
    """Return acceptance and speed of quantised copies as drafters of the model in bfloat16."""
    records = []
    for temperature in (0.0, 1.0):
        common = {"temperature": temperature, "max_tokens": tokens, "gamma": GAMMA}
        ar = {form: forms.recipe(form, method="ar", **common) for form in ("bf16", STORED)}
        drafted = {
            form: forms.recipe("bf16", method="draft", drafter="same", drafter_quantization=form, **common)
            for form in DRAFTERS
        }
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*ar, *drafted)}
        for prompt in (prompts[0], *prompts):
            for name, recipe in {**ar, **drafted}.items():
                runs[name].append(traced(recipe, prompt.text, forms.pool).metrics)
        speeds = {name: [run["tokens_per_second"] for run in found[1:]] for name, found in runs.items()}
        for form in DRAFTERS:
            found = runs[form][1:]
            records.append(
                {
                    "drafter": form,
                    "temperature": temperature,
                    "alpha": statistics.mean(run["alpha"] for run in found if run["alpha"] is not None),
                    "tokens_per_pass": statistics.mean(run["tokens_per_target_pass"] for run in found),
                    "to_bf16": _ratio(speeds[form], speeds["bf16"]),
                    "to_stored": _ratio(speeds[form], speeds[STORED]),
                }
            )
    return records


def _ratio(speeds: Sequence[float], baseline: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(speeds, baseline, strict=True)]
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"


def study(options: argparse.Namespace) -> None:
    """Measure and publish the tables."""
    for name in ("prompts", "max_tokens"):
        at_least_one(name, getattr(options, name))
    if options.llama_completion:
        options.command = options.command.replace(str(options.llama_completion), "PATH")
    prompts = chosen_prompts(options.prompts)
    if "activations" in options.part:
        publish(options, "chat-activations", ACTIVATION_COLUMNS, measure_activations(prompts, options.max_tokens))
    if options.part == ["activations"]:
        return
    with tempfile.TemporaryDirectory() as place:
        forms = Forms(Path(place), ModelPool())
        save_dequantised(forms.folder)
        if "equality" in options.part:
            publish(options, "chat-equality", EQUALITY_COLUMNS, equality(forms, prompts, options))
        if "forms" in options.part:
            publish(options, "chat-forms", FORM_COLUMNS, measure_forms(forms, prompts[:5], options.max_tokens))
        if "drafters" in options.part:
            publish(options, "chat-drafters", DRAFTER_COLUMNS, measure_drafters(forms, prompts[:4], options.max_tokens))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parts = ["equality", "activations", "forms", "drafters"]
    parser.add_argument("--part", nargs="+", default=parts, choices=parts)
    parser.add_argument("--llama-completion", type=Path, metavar="PATH")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
