"""Tables in docs/ and README.md: speeds, costs, policies, transformers, equality with AR, memory, other engines.

`python -m benchmarks.document_tables --write`. Every group of tables comes from one measurement; `--table` selects the
groups that contain the named tables. `--list` prints the command that writes each table of all documents.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.runs import SHAPES, in_new_process, save_random
from benchmarks.tables import ROOT, RUNS, Study, per_width, positive, publish, publish_width, study_command
from specdemo.bench import measure, table
from specdemo.bench.equality import EqualityResult, prompt_prefixes, prove
from specdemo.bench.measure import BASELINES
from specdemo.cli.run import PROGRESS_S, StatusLine
from specdemo.core.errors import UserError, check_name
from specdemo.core.metrics import interval
from specdemo.core.step import Draft
from specdemo.external.engine_log import FIGURES, figure_rows, read_engine_log
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import load
from specdemo.models.memory import process_bytes, release_memory
from specdemo.models.memory_plan import plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import ModelSpec, find_device, is_gguf
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import Prompt, load_prompts, read_questions
from specdemo.recipe import Recipe, plan_run

PERFORMANCE = "docs/performance.md"
ENGINE_LOGS = ROOT / "tests" / "external" / "logs.txt"  # each log follows a line with its name
AR_SPEED = 100.0  # tokens/s; the log has no run without drafts
QUESTION_TABLES = set(per_width("bench-questions"))
METHODS = ("draft", "nasd", "suffix", "hybrid", "tree", "self", "lookahead")
POLICY_NAMES = ("fixed", "auto", "dynamic", "heuristic", "egag", "adaedl", "svip", "confidence", "path")
FAMILIES = {"ar": "generate", "draft": "assisted", "nasd": "prompt lookup", "suffix": "prompt lookup"}
README_ROWS = (("code", "hybrid", 0), ("repetitive", "suffix", 0), ("code", "draft", 1))

Record = dict[str, Any]
SPEEDUP = {"speed-up": "{speedup}", "95 %": "{interval}"}
ACCEPTANCE = {"acc/drafted": "{acceptance_rate}", "mean overlap": "{mean_beta}", "tokens/pass": "{tokens_per_pass}"}
SAME_TEXT, SLOWER = {"same text": "{same_text}"}, {"slower on": "{slower}"}
SPEED = {"tokens/s": "{tokens_per_second}"}
FIRST_TOKEN = {"first token ms": "{ttft_ms}"}
SPEED_COLUMNS = {"recipe": "{lane}", **SPEED, **SPEEDUP, **SAME_TEXT, **ACCEPTANCE, **SLOWER}
COST_COLUMNS = {
    "recipe": "{lane}",
    **{name: f"{{{name}}}" for name in ("c", "v", "o")},
    "Thm 3.8": "{theory}",
    **{name: f"{{{name}}}" for name in ("realised", "explained")},
    **FIRST_TOKEN,
    "MB": "{megabytes}",
    "bandwidth": "{bandwidth}",
}
POLICY_COLUMNS = {
    "recipe": "{lane}",
    **SPEEDUP,
    "over the best fixed gamma": "{over_fixed}",
    "tokens/pass": ACCEPTANCE["tokens/pass"],
}
README_COLUMNS = {"prompts": "{kind}, temperature {temperature}", "recipe": "`{method}`", **SPEEDUP}
PEER_COLUMNS = {"ratio to AR": "{ratio}", "ratio to transformers": "{to_peer}"}
TRANSFORMERS_COLUMNS = {"class": "{kind}", "lane": "{lane}", **SPEED, **PEER_COLUMNS, **SAME_TEXT, **FIRST_TOKEN}
QUESTION_COLUMNS = {
    "category": "{kind}",
    "prompts": "{prompts}",
    "recipe": "{lane}",
    **SPEED,
    **SPEEDUP,
    "slowest prompt": "{slowest}",
    **SAME_TEXT,
    "tokens/pass": ACCEPTANCE["tokens/pass"],
}
CHAT_COLUMNS = {"class": "{kind}", "recipe": "{lane}", **SPEED, **SPEEDUP, **SAME_TEXT, **ACCEPTANCE}
MEMORY_CONTEXT = 1024
MEMORY_COLUMNS = {
    "model": "{model}",
    "form": "{form}",
    "estimated MB": "{estimated:.1f}",
    "measured MB": "{measured:.1f}",
    "measured / estimated": "{ratio:.2f}",
}
PROVE_COLUMNS = {
    **{name: f"{{{name}}}" for name in ("dtype", "method", "gamma", "temperature", "rule", "texts")},
    **{name: f"{{{name}:,}}" for name in ("tokens", "accepted")},
    "equal to AR": "{equal} of {texts}",
}


def of_each_class(prompts: Sequence[Prompt], part: slice) -> list[Prompt]:
    """Return a part of the prompts of every class."""
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    return [prompt for kind in kinds for prompt in [prompt for prompt in prompts if prompt.kind == kind][part]]


def measured(
    recipes: Sequence[Recipe], prompts: Sequence[Prompt], peers: Sequence[str] = (), repeat: int = 1
) -> list[Record]:
    records, progress = [], StatusLine(PROGRESS_S)
    for item in measure.measure(recipes, prompts, ModelPool(), peers, repeat=repeat):
        if isinstance(item, dict):
            records.append(item)
        else:
            progress.show(str(item))
    progress.clear()
    return records


def pooled(records: Sequence[Record]) -> list[Record]:
    return [{**record, "kind": "all"} for record in records]


def recipe_grid(max_tokens: int, *varied: Any) -> list[Recipe]:
    """Return the recipes of `measure.grid` for the bundled pair in float32."""
    return [Recipe(dtype="float32", max_tokens=max_tokens, **values) for values in measure.grid(*varied)]


def methods(options: argparse.Namespace) -> None:
    """Publish speeds and costs of all methods, over all classes and by class, and the figures of the README."""
    recipes = recipe_grid(options.max_tokens or 64, METHODS, [3], ["fixed"], [0.0, 1.0])
    records = measured(recipes, of_each_class(load_prompts(), slice(options.prompts or 12)))
    bandwidth = measure.copy_bandwidth(find_device(recipes[0].device))
    rows = [table.row_cells(row) for row in table.table(recipes, pooled(records), bandwidth=bandwidth)]
    publish(options, "bench", SPEED_COLUMNS, rows)
    drafting = [row for row, recipe in zip(rows, recipes, strict=True) if recipe.method != "ar"]
    publish(options, "bench-costs", COST_COLUMNS, drafting)
    by_class = table.table(recipes, records)
    kinds = list(dict.fromkeys(row.kind for row in by_class))
    speedups = {(row.kind, row.lane): row for row in by_class}
    lanes = [measure.recipe_label(recipe) for recipe in recipes if recipe.method != "ar"]
    class_rows = [{"lane": lane, **{k: table.row_cells(speedups[k, lane])["ratio"] for k in kinds}} for lane in lanes]
    publish(options, "bench-classes", {"recipe": "{lane}", **{kind: f"{{{kind}}}" for kind in kinds}}, class_rows)
    readme = []
    for kind, method, temperature in README_ROWS:
        lane = next(r for r in recipes if (r.method, r.temperature) == (method, temperature))
        row = table.row_cells(speedups[kind, measure.recipe_label(lane)])
        readme.append({**row, "method": method, "temperature": temperature})
    publish(options, "bench-readme", README_COLUMNS, readme)


def policies(options: argparse.Namespace) -> None:
    """Publish speeds of all draft-length policies over all classes."""
    recipes = recipe_grid(options.max_tokens or 64, ["draft"], [2, 3, 4], POLICY_NAMES, [0.0, 1.0])
    records = measured(recipes, of_each_class(load_prompts(), slice(options.prompts or 10)))
    rows = [table.row_cells(row) for row in table.table(recipes, pooled(records))]
    drafting = [row for row, recipe in zip(rows, recipes, strict=True) if recipe.method != "ar"]
    publish(options, "bench-policies", POLICY_COLUMNS, drafting)


def chat_recipes(max_tokens: int) -> list[Recipe]:
    """Return AR decoding and the chat pair's own settings at temperature 0, its own, and 1."""
    pair = {"pair": CHAT_PAIR, "chat": True, "max_tokens": max_tokens}
    settings = PAIRS[CHAT_PAIR].settings
    recipes = []
    for temperature in (0.0, settings["temperature"], 1.0):
        sampling = {"temperature": temperature, "top_p": settings["top_p"] if temperature < 1 else 1.0}
        for method, policy in (("ar", "fixed"), (settings["method"], settings["policy"])):
            recipes.append(replace(Recipe(), **pair, **sampling, gamma=settings["gamma"], method=method, policy=policy))
    return recipes


def chat_classes(options: argparse.Namespace) -> None:
    """Publish the speed of the chat pair by class and pooled, at its own settings and with suffixes alone.

    The settings were chosen with the first prompts of each class; these are the last.
    """
    recipes = chat_recipes(options.max_tokens or 128)
    recipes.insert(2, replace(recipes[1], method="suffix", policy="fixed"))
    records = measured(recipes, of_each_class(load_prompts(chat=True), slice(-(options.prompts or 10), None)))
    rows = table.table(recipes, [*records, *pooled(records)])
    publish_width(options, "bench-chat", CHAT_COLUMNS, [table.row_cells(row) for row in rows])
    settings = PAIRS[CHAT_PAIR].settings
    lanes = {measure.recipe_label(recipe): recipe for recipe in recipes if recipe.method == settings["method"]}
    readme = [
        {**table.row_cells(row), "method": settings["method"], "temperature": f"{lanes[row.lane].temperature:g}"}
        for row in rows
        if row.lane in lanes and (row.kind == "all" or lanes[row.lane].temperature == 0)
    ]
    publish(options, "chat-readme", README_COLUMNS, readme)


def chat_questions(options: argparse.Namespace) -> None:
    """Publish the speed of the chat pair on the first turns of questions, by category and pooled."""
    recipes = chat_recipes(options.max_tokens or 128)
    questions = [replace(prompt, later=()) for path in options.questions for prompt in read_questions(path)]
    records = measured(recipes, questions, repeat=options.repeat)
    rows = table.table(recipes, [*pooled(records), *records])
    drafting = [row for row in rows if row.speedup is not None]
    slowest = [row.slower[0] if row.slower else "none below 1" for row in drafting]
    records = [{**table.row_cells(row), "slowest": name} for row, name in zip(drafting, slowest, strict=True)]
    publish_width(options, "bench-questions", QUESTION_COLUMNS, records)


def transformers(options: argparse.Namespace) -> None:
    """Publish speeds of this program and of transformers with the same weights."""
    rows: list[dict[str, str]] = []
    for kind, names, gammas in (("code", ("draft", "nasd"), [3]), ("repetitive", ("nasd", "suffix"), [3, 7])):
        recipes = recipe_grid(options.max_tokens or 64, names, gammas, ["fixed"], [0.0])
        drafting = any(plan_run(recipe).drafter for recipe in recipes)
        peers = [name for name, peer in BASELINES.items() if drafting or peer.assistant is None]
        records = measured(recipes, load_prompts(kinds=[kind])[: options.prompts or 12], peers)
        rows += compared_with_peers(recipes, records, peers)
    publish(options, "bench-transformers", TRANSFORMERS_COLUMNS, rows)


def compared_with_peers(
    recipes: Sequence[Recipe], records: Sequence[Record], peers: Sequence[str]
) -> Iterator[dict[str, str]]:
    """Yield the row of each lane, with the paired ratio to the fastest baseline of the same family."""
    rows = table.table(recipes, records, peers)
    fastest = {}  # index of the run by family
    for row in rows[len(recipes) :]:
        title = row.lane.removeprefix("transformers ").rpartition(" T=")[0]
        fastest[BASELINES[title].family] = len(recipes) + peers.index(title)
    for i, row in enumerate(rows):
        to_peer = "-"
        if i < len(recipes):
            peer = fastest[FAMILIES[recipes[i].method]]
            pairs = [(record["runs"][i], record["runs"][peer]) for record in records]
            ratios = [table.run_speed(ours) / table.run_speed(theirs) for ours, theirs in pairs]
            to_peer = table.ratio_with_interval(statistics.median(ratios), interval(ratios))
        yield {**table.row_cells(row), "to_peer": to_peer}


def equality(options: argparse.Namespace) -> None:
    """Publish the number of texts equal to AR decoding: `coupled` in float32, greedy in bfloat16."""
    settings: dict[str, Any] = {"top_p": 1.0, "max_tokens": options.max_tokens or 32}
    coupled = [
        Recipe(dtype="float32", method=m, gamma=3, temperature=t, rule="coupled", **settings)
        for t in (0.7, 1.3)
        for m in ("draft", "nasd", "hybrid", "tree")
    ]
    greedy = [
        Recipe(dtype="bfloat16", gamma=gamma, temperature=0.0, max_tokens=options.max_tokens or 128)
        for gamma in (1, 3, 5, 7)
    ]
    records = []
    for recipes, count in ((coupled, 60), (greedy, 40)):
        results = [EqualityResult(recipe) for recipe in recipes]
        for _ in prove(results, prompt_prefixes(load_prompts(), options.prompts or count), ModelPool()):
            pass
        for result in results:
            recipe = {name: getattr(result.recipe, name) for name in ("dtype", "method", "gamma", "rule")}
            figures = {name: getattr(result, name) for name in ("texts", "tokens", "accepted")}
            equal = result.texts - len(result.differences)
            records.append({**recipe, "temperature": f"{result.recipe.temperature:g}", **figures, "equal": equal})
    publish(options, "prove", PROVE_COLUMNS, records)


def recorded_logs() -> dict[str, str]:
    """Return logs of public threads, whose addresses are their first lines, by name."""
    _, *parts = re.split(r"^=== (.+)\n", ENGINE_LOGS.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def engine_figures(options: argparse.Namespace) -> None:
    """Publish the figures of a recorded log as the engines define them."""
    rows = figure_rows(read_engine_log(recorded_logs()["llama-eagle3.log"], AR_SPEED))
    records = [dict(zip(FIGURES, row, strict=True)) for row in rows]
    publish(options, "engine-figures", {name: f"{{{name}}}" for name in FIGURES}, records)


def added_memory(model: str, name: str, form: str) -> dict[str, Any]:
    CachedModel(load(ModelSpec(PAIRS["bundled"].drafter or "", quantization=form, device="cpu")).model).read([1] * 64)
    spec = ModelSpec(name, quantization=form, device="cpu").resolved()
    estimated = plan_spec(spec, MEMORY_CONTEXT).after_run / 1e6
    release_memory()
    before = process_bytes()
    cached = CachedModel(load(spec).model)
    cached.score([i % cached.vocab_size for i in range(MEMORY_CONTEXT)], Draft())
    release_memory()
    used = (process_bytes() - before) / 1e6
    return {"model": model, "form": form, "estimated": estimated, "measured": used, "ratio": used / estimated}


def memory(options: argparse.Namespace) -> None:
    """Publish measured and estimated memory: the bundled models, the chat model and a random Llama in each form.

    Each case runs in a new process, after the bundled drafter; one thread needs the least memory.
    """
    names = {"target": PAIRS["bundled"].target, "drafter": PAIRS["bundled"].drafter, CHAT_PAIR: PAIRS[CHAT_PAIR].target}
    with tempfile.TemporaryDirectory() as folder:
        save_random(SHAPES["llama-30m"], Path(folder))
        records = [
            in_new_process(added_memory, model, name, form)
            for model, name in {**names, "llama-30m": folder}.items()
            if name
            for form in (("none", "bf16") if is_gguf(name) else ("none", "bf16", "int8", "nf4"))
        ]
    publish(options, "memory", MEMORY_COLUMNS, records)


# Tables and their documents, by the measurement that publishes them
GROUPS = {
    methods: {**dict.fromkeys(("bench", "bench-classes", "bench-costs"), PERFORMANCE), "bench-readme": "README.md"},
    chat_classes: {**dict.fromkeys(per_width("bench-chat"), PERFORMANCE), "chat-readme": "README.md"},
    chat_questions: dict.fromkeys(per_width("bench-questions"), PERFORMANCE),
    policies: {"bench-policies": "docs/policies.md"},
    transformers: {"bench-transformers": PERFORMANCE},
    equality: {"prove": PERFORMANCE},
    engine_figures: {"engine-figures": "docs/other-engines.md"},
    memory: {"memory": "docs/models.md"},
}
TABLES = {name: document for tables in GROUPS.values() for name, document in tables.items()}


def study(options: argparse.Namespace) -> None:
    """Measure the groups of the selected tables, or list all tables of the documents."""
    if options.list:
        for run in RUNS:
            print(f"{run.command}  # {run.minutes:g} min: {', '.join(run.tables)}")
        return
    for name in options.table:
        check_name("table", name, TABLES)
    selected = set(options.table or TABLES)
    if not options.questions:
        if selected & QUESTION_TABLES and options.table:
            raise UserError("bench-questions needs --questions: give JSON Lines with question_id, category and turns")
        selected -= QUESTION_TABLES
    command = options.command
    for measure_group, tables in GROUPS.items():
        if selected & set(tables):
            options.command = command if options.table else f"{command} --table {next(iter(tables))}"
            measure_group(options)


OPTIONS = {
    "list": {"action": "store_true", "help": "list the command that writes each table, and stop"},
    "prompts": {"type": positive, "metavar": "N", "help": "prompts (of each class) instead of the default"},
    "max_tokens": {"type": positive, "metavar": "N", "help": "tokens of each run instead of the default"},
    "questions": {"nargs": "+", "type": Path, "default": [], "metavar": "FILE", "help": "files for bench-questions"},
    "repeat": {"type": positive, "default": 1, "metavar": "N", "help": "runs of each question with each recipe"},
    "table": {"nargs": "+", "default": [], "metavar": "NAME", "help": f"tables: {', '.join(TABLES)}"},
}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
