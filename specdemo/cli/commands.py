"""Commands that print tables: `bench`, `prove`, `preflight`; and `serve`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from specdemo import bench
from specdemo.bench import equality as prove
from specdemo.bench.baselines import BASELINES
from specdemo.cli.arguments import given
from specdemo.cli.output import OutputFile, output_file
from specdemo.core.errors import UserError
from specdemo.core.formats import megabytes
from specdemo.core.rules import reproducing_rule
from specdemo.drafters import METHODS
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import find_device
from specdemo.models.zoo import CHAT_PAIR
from specdemo.preflight import preflight, texts_for
from specdemo.prompts import Prompt, load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.access import TOKEN, is_loopback, read_token
from specdemo.remote.serve import bind, listen, serve_model
from specdemo.remote.server import ServiceLimits


def run_command(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Return the exit code: 2 after a `UserError`, which is printed."""
    try:
        return command(options)
    except UserError as error:
        print(f"specdemo: {error}", file=sys.stderr)
        return 2


def _bench(options: argparse.Namespace) -> int:
    at_least_one("repeat", options.repeat)
    varying = ("method", "gamma", "policy", "temperature")
    common = {name: value for name, value in given(options).items() if name not in varying}
    common["chat"] = common.get("pair") == CHAT_PAIR
    varied = list(bench.grid(options.method, options.gamma, options.policy, options.temperature))
    if cloud := common.get("cloud"):  # the fastest AR baseline: no round trip per token
        alone = {"cloud": replace(cloud, mode="cloud_only")}
        varied = [{**values, **(alone if values["method"] == "ar" else {})} for values in varied]
    recipes = [Recipe(**{**common, **values}) for values in varied]
    prompts = load_prompts(options.kind, common["chat"])
    peers = []
    if options.peers:
        drafting = any(recipe.drafter_spec for recipe in recipes)
        peers = [name for name, peer in BASELINES.items() if drafting or peer.assistant is None]
    opened = nullcontext() if options.output is None else output_file(options.output, "the report")
    with opened as file:
        return _print_bench(options, recipes, prompts, peers, file)


def _print_bench(
    options: argparse.Namespace,
    recipes: Sequence[Recipe],
    prompts: Sequence[Prompt],
    peers: Sequence[str],
    file: OutputFile | None,
) -> int:
    records, progress = [], bench.Progress()
    for item in bench.measure(recipes, prompts, ModelPool(), peers, repeat=options.repeat):
        if isinstance(item, dict):
            records.append(item)
        else:
            progress.show(str(item))
    progress.over()
    bandwidth = bench.copy_bandwidth(find_device(recipes[0].device))
    rows = bench.table(recipes, records, peers, bandwidth)
    print(bench.markdown(rows))
    for line in bench.slower(rows):
        print(line)
    print(f"copy bandwidth of this machine: {bandwidth / 1e9:.1f} GB/s")
    print(bench.as_json(rows))
    if file is not None:
        file.write(bench.report(recipes, len(prompts), records, rows))
    return 0


def _prove(options: argparse.Namespace) -> int:
    at_least_one("prompts", options.prompts)
    for name in options.method:
        if name in METHODS and not METHODS[name].exact:
            raise UserError(f"method {name} does not sample from the target's distribution: choose another method")
    common = {name: value for name, value in given(options).items() if name not in ("method", "gamma", "temperature")}
    recipes = [
        Recipe(
            **common,
            method=method,
            gamma=gamma,
            temperature=temperature,
            top_p=1.0,
            rule=reproducing_rule(temperature),
        )
        for temperature in options.temperature
        for method in options.method
        for gamma in options.gamma
    ]
    prompts = prove.prompt_prefixes(load_prompts(), options.prompts)
    findings = [prove.EqualityResult(recipe) for recipe in recipes]
    progress = bench.Progress()
    for i, _ in enumerate(prove.prove(findings, prompts, ModelPool()), 1):
        progress.show(f"{i} of {len(prompts)} prompts")
    progress.over()
    print(prove.equality_table(findings))
    differences = [(finding, *where) for finding in findings for where in finding.differences]
    for finding, name, token in differences:
        label = bench.recipe_label(finding.recipe)
        print(f"{label} differs from autoregressive decoding on {name} at token {token + 1}")
    return 1 if differences else 0


def _preflight(options: argparse.Namespace) -> int:
    values = given(options)
    recipe = Recipe(**{**values, "top_p": 1.0, "chat": values.get("pair") == CHAT_PAIR})
    estimate = preflight(recipe, texts_for(recipe, options.kind), ModelPool())
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
    print(estimate.advice)
    return 0


def at_least_one(name: str, count: int) -> None:
    """Raise `UserError` unless `count` is positive."""
    if count < 1:
        raise UserError(f"{name} must be at least 1, not {count}")


def _serve(options: argparse.Namespace) -> int:
    if min(options.budget_mb, options.contexts, options.queue) < 1 or not (options.body_mb > 0 and options.rate >= 0):
        raise UserError("budget-mb, contexts, queue and body-mb must be above 0, and rate at least 0")
    token, local = read_token(os.environ), is_loopback(options.host)
    for path in (options.certificate, options.key):
        if path is not None and not path.is_file():
            raise UserError(f"file {path} does not exist: give certificate and key as PEM files")
    spec = Recipe(method="ar", **given(options)).target_spec
    target = ModelPool().take(spec)
    if target.encoder:
        raise UserError("models with an encoder cannot be served: use run")
    listener = bind(options.host, options.port)
    app = serve_model(
        target,
        token=token,
        budget_bytes=options.budget_mb << 20,
        max_contexts=options.contexts,
        expiry_s=options.expiry_s,
        limits=ServiceLimits(int(options.body_mb * (1 << 20)), options.rate),
        waiting=options.queue,
        local=local,
    )
    if token is None and not local:
        print(f"clients of {options.host} need no authentication: set {TOKEN} to require a token", file=sys.stderr)
    scheme = "https" if options.certificate else "http"
    line = f"listening on {scheme}://{options.host}:{listener.getsockname()[1]}"
    leash = sys.stdin.buffer if options.until_stdin_ends else None
    listen(app, listener, options.certificate, options.key, leash, announce=lambda: print(line, flush=True))
    return 0


COMMANDS = {
    "serve": _serve,
    "preflight": _preflight,
    "bench": _bench,
    "prove": _prove,
}
