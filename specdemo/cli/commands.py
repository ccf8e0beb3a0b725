"""Commands other than `run`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from specdemo import __version__
from specdemo.bench import equality, measure, table
from specdemo.bench.calibration import calibrate, refuse_without_drafter
from specdemo.bench.measure import BASELINES
from specdemo.bench.pairs import measure_pair, pair_bench, pairs_table, skipped_lines
from specdemo.bench.published_tables import leviathan_tables, repetition_table
from specdemo.bench.table import category_table
from specdemo.cli.arguments import announce_pair, checked_recipe, given
from specdemo.cli.chat import chat
from specdemo.cli.run import PROGRESS_S, OutputFile, StatusLine, read_limited
from specdemo.cli.serve import check_options, serve_here
from specdemo.core.errors import UserError, check_name
from specdemo.core.formats import megabytes
from specdemo.core.rules import reproducing_rule
from specdemo.drafters import METHODS
from specdemo.external.client import top_tokens_of
from specdemo.external.engine_log import FIGURES, conclusions, figure_rows, figures_line, read_engine_log
from specdemo.external.proof_bundle import ProofBundle, ProvedRun, read_bundle
from specdemo.fit import COLUMNS, advice, fit, ranked, short_name
from specdemo.models.hub import Hub, file_digests, model_directories
from specdemo.models.limited_process import convert_head
from specdemo.models.load import identify
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import find_device
from specdemo.models.zoo import CHAT_PAIR, PAIRS, fingerprint
from specdemo.option_rules import ineffective
from specdemo.preflight import PreflightProgress, preflight
from specdemo.prompts import Prompt, alternate_classes, load_prompts, read_questions
from specdemo.recipe import Recipe, plan_run

Result = TypeVar("Result")
_PROVED_OPTIONS = (  # that decide a text, without names of models and devices
    *("method", "gamma", "temperature", "top_p", "rule", "max_tokens"),
    *("dtype", "quantization", "drafter_quantization", "activations", "universal"),
)


def _results(items: Iterable[Result | measure.BenchProgress | PreflightProgress]) -> Iterator[Result]:
    progress = StatusLine(PROGRESS_S)
    for item in items:
        if isinstance(item, (measure.BenchProgress, PreflightProgress)):
            progress.show(str(item))
        else:
            yield item
    progress.clear()


def _bench(options: argparse.Namespace) -> int:
    pairs = options.pair or []
    if len(pairs) > 1:
        return _bench_pairs(options, list(dict.fromkeys(pairs)))
    options.pair = pairs[0] if pairs else None
    common, varied, lists = _bench_settings(options)
    recipes = [replace(Recipe(), **{**common, **values}) for values in varied]
    _refuse_unused(recipes, [*common, *lists])
    prompts = _bench_prompts(options, common["chat"])
    baselines = []
    if options.peers:
        drafting = any(plan_run(recipe).drafter for recipe in recipes)
        baselines = [name for name, baseline in BASELINES.items() if drafting or baseline.assistant is None]
    announce_pair(common)
    opened = nullcontext() if options.output is None else closing(OutputFile(options.output, "the report"))
    with opened as file:
        records = list(_results(measure.measure(recipes, prompts, ModelPool(), baselines, repeat=options.repeat)))
        bandwidth = measure.copy_bandwidth(find_device(recipes[0].device))
        rows = table.table(recipes, records, baselines, bandwidth)
        print("\n".join([table.markdown(rows), *table.slower(rows)]))
        questions = category_table(recipes, records) if options.prompts is not None else ""
        for part in filter(None, (table.acceptance_markdown(rows), questions, repetition_table(rows))):
            print(f"\n{part}")
        print(f"\ncopy bandwidth of this machine: {bandwidth / 1e9:.1f} GB/s\n{table.as_json(rows)}")
        if file is not None:
            file.write(table.report(recipes, len(prompts), records, rows))
    return 0


def _bench_settings(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Return common values, the values of each recipe, and the lists of options of methods."""
    varying = ("method", "gamma", "policy", "temperature")
    common = {name: value for name, value in given(options).items() if name not in varying}
    lists = {name: common.pop(name) for name in (*measure.VARIED, "external") if name in common}
    common["chat"] = common.get("pair") == CHAT_PAIR
    varied = list(measure.grid(options.method, options.gamma, options.policy, options.temperature, **lists))
    if cloud := common.get("cloud"):  # the fastest AR baseline: no round trip per token
        alone = {"cloud": replace(cloud, mode="cloud_only")}
        varied = [{**values, **(alone if values["method"] == "ar" else {})} for values in varied]
    return common, varied, lists


def _bench_prompts(options: argparse.Namespace, chat: bool) -> list[Prompt]:
    if options.prompts is not None:
        return read_questions(options.prompts, options.kind)
    return load_prompts(options.kind, chat)


def _bench_pairs(options: argparse.Namespace, names: Sequence[str]) -> int:
    """Measure every pair with its own models and prompts, and list those that cannot run."""
    for noun, chosen, known in (("pair", names, PAIRS), ("method", options.method, METHODS)):
        for name in chosen:
            check_name(noun, name, known)
    for flag, value in (("--peers", options.peers), ("--output", options.output), ("--target", options.target)):
        if value:
            raise UserError(f"{flag} needs a single pair: give one, or omit it")
    benches, progress = [], StatusLine(PROGRESS_S)
    for name in names:
        options.pair = name
        common, varied, _ = _bench_settings(options)
        bench = pair_bench(name, partial(replace, Recipe(), **common), varied)
        benches.append(bench)
        for item in measure_pair(bench, _bench_prompts(options, common["chat"]), ModelPool(), options.repeat):
            progress.show(f"{name}: {item}")
    progress.clear()
    print("\n".join([pairs_table(benches), *skipped_lines(benches), "", leviathan_tables()]))
    return 0


def _refuse_unused(recipes: Sequence[Recipe], named: Iterable[str]) -> None:
    """Raise `UserError` for an option without effect in all recipes that draft."""
    drafting = [recipe for recipe in recipes if recipe.method != "ar"] or recipes
    for name in named:
        problems = [dict(ineffective(recipe, [name])).get(name) for recipe in drafting]
        if all(problems):
            raise UserError(problems[0])


def _prove(options: argparse.Namespace) -> int:
    for name in options.method:
        if name in METHODS and not METHODS[name].exact:
            raise UserError(f"method {name} does not sample from the target's distribution: choose another method")
    common = {name: value for name, value in given(options).items() if name not in ("method", "gamma", "temperature")}
    server = common.pop("external", None)
    exact = {"top_p": 1.0, **common}
    rules = {temperature: reproducing_rule(temperature, common.get("rule")) for temperature in options.temperature}
    recipes = [
        replace(Recipe(), **exact | {"rule": rules[temperature]}, method=method, gamma=gamma, temperature=temperature)
        for temperature in options.temperature
        for method in options.method
        for gamma in options.gamma
    ]
    _refuse_unused(recipes, common)
    if server is not None:
        recipes.append(replace(Recipe(), **exact, method="ar", temperature=0.0, external=server))
    announce_pair(common)
    prompts = equality.prompt_prefixes(load_prompts(), options.prompts)
    findings = [equality.EqualityResult(recipe) for recipe in recipes]
    pool = ModelPool()
    opened = nullcontext() if options.bundle is None else closing(OutputFile(options.bundle, "the bundle"))
    with opened as file:
        _compare_texts(findings, prompts, pool)
        if file is not None:
            file.write(_proof_bundle(findings, pool).write())
    print(equality.equality_table(findings))
    for finding in findings:
        for name, token in finding.differences:
            label = measure.recipe_label(finding.recipe)
            print(f"{label} differs from autoregressive decoding on {name} at token {token + 1}")
    return 1 if any(finding.differences for finding in findings) else 0


def _compare_texts(results: Sequence[equality.EqualityResult], prompts: Sequence[Prompt], pool: ModelPool) -> None:
    progress = StatusLine(PROGRESS_S)
    for i, _ in enumerate(equality.prove(results, prompts, pool), 1):
        progress.show(f"{i} of {len(prompts)} prompts")
    progress.clear()


def _proof_bundle(results: Sequence[equality.EqualityResult], pool: ModelPool) -> ProofBundle:
    recipes = [result.recipe for result in results]
    target = pool.get(plan_run(recipes[0]).target)
    numerics = identify(target, fingerprint(target.tokenizer), pool.hub).numerics
    software = {equality.PROGRAM: {"version": __version__, "engine": target.engine, "numerics": numerics}}
    for result in results:
        if server := result.recipe.external:
            version = top_tokens_of(server, result.proved[0].prompt_ids).system_fingerprint
            software[result.engine] = {"version": version or "unknown"}
    runs = [
        ProvedRun(
            engine=result.engine,
            options={name: getattr(result.recipe, name) for name in _PROVED_OPTIONS},
            texts=result.proved,
        )
        for result in results
    ]
    return ProofBundle(software=software, files=_files(recipes, pool), runs=runs)


def _files(recipes: Sequence[Recipe], pool: ModelPool) -> dict[str, str]:
    """Load the models; return the SHA-256 of their files by `role/file`."""
    digests = {}
    for plan in map(plan_run, recipes):
        for role, spec in plan.models.items():
            digests[role] = file_digests(spec.name, pool.get(spec).spec.revision, pool.hub)
        if plan.head is not None:
            pool.get_head(plan.head)
            digests["head"] = file_digests(plan.head.name, None, pool.hub)
    return {f"{role}/{file}": digest for role, files in digests.items() for file, digest in files.items()}


def _check_bundle(options: argparse.Namespace) -> int:
    """Return 1 if a repeated text differs. Raises `UserError` for a bundle that cannot be repeated."""
    bundle = read_bundle(read_limited(options.file, "a proof bundle", "prove fewer prompts"))
    common, pool = given(options), ModelPool()
    results = [equality.EqualityResult(_repeated(run, common)) for run in bundle.runs]
    prompts = [Prompt("", f"text {i}", text.prompt) for i, text in enumerate(bundle.runs[0].texts)]
    if different := _files([result.recipe for result in results], pool).items() ^ bundle.files.items():
        raise UserError(
            f"the bundle was made with other files ({min(different)[0][:100]}): name its models, see --pair"
        )
    _compare_texts(results, prompts, pool)
    changed = 0
    for run, result in zip(bundle.runs, results, strict=True):
        for i, (text, repeated) in enumerate(zip(run.texts, result.proved, strict=True)):
            if not text.repeats(repeated):
                changed += 1
                print(f"text {i} of {run.engine} {run.options} is another one here")
    count = len(bundle.runs) * len(prompts)
    print(f"{count} texts repeated, {changed} of them with other ids or margins")
    return 1 if changed else 0


def _repeated(run: ProvedRun, common: dict[str, Any]) -> Recipe:
    server = common.get("external")
    if run.engine != equality.PROGRAM and run.engine != str(server).partition("=")[0]:
        raise UserError(f"the bundle has a run of {run.engine!r}: give its server as --external ENGINE=URL")
    if unknown := run.options.keys() - set(_PROVED_OPTIONS):
        raise UserError(f"unknown option {min(unknown)!r}: known are {', '.join(_PROVED_OPTIONS)}")
    return replace(
        Recipe(), **{**common, **run.options, "external": server if run.engine != equality.PROGRAM else None}
    )


def _measured_recipe(options: argparse.Namespace, **fixed: Any) -> Recipe:
    """Return the recipe of the flags, with a chat if that is the purpose of the pair; announce the pair."""
    values = given(options)
    chat = values.get("pair") == CHAT_PAIR
    return checked_recipe({**values, **fixed, "chat": chat}, values.keys() - {"temperature"})  # which has a default


def _preflight(options: argparse.Namespace) -> int:
    recipe = _measured_recipe(options, top_p=1.0)
    estimate = preflight(recipe, load_prompts(options.kind, recipe.chat), ModelPool())
    print(f"texts of the target: {estimate.texts}")
    weights, kv = megabytes(estimate.weight_bytes, 0), megabytes(estimate.kv_bytes, 2)
    print(f"weights {weights} MB, KV cache {kv} MB per 1,000 tokens")
    print(
        f"alpha {estimate.alpha:.2f}  c {estimate.c:.2f}  "
        + "  ".join(f"v({n}) {v:.2f}" for n, v in estimate.v.items())
    )
    for length in estimate.estimates:
        print(
            f"{estimate.label(length)}: {length.tokens_per_pass:.2f} tokens per pass, "
            f"{length.speedup:.2f}x [{length.low:.2f}, {length.high:.2f}]"
        )
    if estimate.held_out:
        print(f"held out, {estimate.held_out}")
    print(estimate.advice)
    return 0


def _fit(options: argparse.Namespace) -> int:
    if options.directories:
        for program, folder in model_directories():
            print(f"{program}: {folder}{'' if folder.is_dir() else ' (missing)'}")
        return 0
    if options.model is None:
        raise UserError("a target is missing: give a pair, a hub id in the cache, a directory or a GGUF file")
    pool = ModelPool(hub=Hub(offline=True))
    rows = ranked(_results(fit(options.model, options.files, given(options), pool, options.kind, options.quick)))
    if options.json:
        print(json.dumps({"candidates": [row.as_dict() for row in rows], "advice": advice(rows)}))
        return 0
    print(f"{table.markdown_table(COLUMNS, [row.cells for row in rows])}\n")
    for row in rows:
        print("\n  ".join(filter(None, (short_name(row.candidate), row.reason, row.command))))
    print(f"\n{advice(rows)}")
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    refuse_without_drafter(options.pair, options.target, options.drafter)
    recipe = _measured_recipe(options)
    prompts = alternate_classes(load_prompts(options.kind, recipe.chat))[: options.prompts]
    (item,) = _results(calibrate(recipe, prompts, ModelPool()))
    print(f"{item.tokens} draft tokens of {item.texts} texts")
    print(table.markdown_table(("signal", "percentile", "this pair", "guide"), item.rows()))
    if item.missing:
        print(f"no variance: {item.missing}")
    print(f"flags: {item.flags}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    check_options(options)
    if not options.ray:
        serve_here(options)
        return 0
    try:
        from specdemo.cli.ray_serve import serve_until_signal
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise UserError("package ray is not installed: install ray[serve], or omit --ray") from error
    serve_until_signal(options)
    return 0


def _explain(options: argparse.Namespace) -> int:
    text = read_limited(options.file, "log lines", "keep the lines with statistics")
    reported = read_engine_log(text, options.ar)
    print(figures_line(reported))
    for position, rate in enumerate(reported.by_position, 1):
        print(f"position {position:>2}  {rate:.3f}  {'#' * round(40 * rate)}")
    print("\n".join(conclusions(reported)))
    if rows := list(figure_rows(reported)):
        print(f"\n{table.markdown_table(FIGURES, rows)}")
    return 0


def _convert_head(options: argparse.Namespace) -> int:
    count = convert_head(options.file, options.directory)
    print(f"wrote {count:,} tensors to {options.directory}")
    return 0


COMMANDS = {
    "chat": chat,
    "serve": _serve,
    "preflight": _preflight,
    "fit": _fit,
    "calibrate": _calibrate,
    "bench": _bench,
    "prove": _prove,
    "check-bundle": _check_bundle,
    "explain": _explain,
    "convert-head": _convert_head,
}
