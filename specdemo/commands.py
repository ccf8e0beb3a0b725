"""What the terminal does besides running a prompt: it measures, proves and searches, and prints a table."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import replace

from specdemo import bench, foretold, layers, prove, regret
from specdemo.bench import stores
from specdemo.bench.table import interval
from specdemo.bench.written import write
from specdemo.core.errors import Refused
from specdemo.models.cached import CachedModel
from specdemo.models.cost import pass_seconds
from specdemo.models.peers import PEERS
from specdemo.models.shelf import Shelf
from specdemo.models.spec import find_device
from specdemo.options import given
from specdemo.preflight import preflight, texts_for
from specdemo.recipe import Recipe
from specdemo.remote.connect import TOKEN
from specdemo.remote.host import application, bind, listen
from specdemo.remote.server import Limits


def _bench(options: argparse.Namespace) -> int:
    _some("repeat", options.repeat)
    varying = ("method", "gamma", "policy", "temperature")
    common = {name: value for name, value in given(options).items() if name not in varying}
    varied = bench.grid(options.method, options.gamma, options.policy, options.temperature)
    if cloud := common.get("cloud"):  # plain decoding at its best: no round trip per token
        alone = {"cloud": replace(cloud, mode="cloud_only")}
        varied = [{**one, **(alone if one["method"] == "ar" else {})} for one in varied]
    recipes = [Recipe(**{**common, **one}) for one in varied]
    prompts = bench.load_prompts(kinds=options.kind)
    peers = []
    if options.peers:
        drafting = any(recipe.drafter_spec for recipe in recipes)
        peers = [name for name, peer in PEERS.items() if drafting or peer.assistant is None]
    records, progress = [], bench.Progress()
    for item in bench.measure(recipes, prompts, Shelf(), peers, repeat=options.repeat):
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
    if options.output:
        options.output.write_text(bench.report(recipes, len(prompts), records, rows), encoding="utf-8")
    return 0


def _prove(options: argparse.Namespace) -> int:
    _some("prompts", options.prompts)
    if "beam" in options.method:
        raise Refused("a beam search writes a text of its own: prove the methods that keep the target's law")
    common = {name: value for name, value in given(options).items() if name not in ("method", "gamma", "temperature")}
    recipes = [
        Recipe(
            **common,
            method=method,
            gamma=gamma,
            temperature=temperature,
            top_p=1.0,
            rule="coupled" if temperature else "rejection",
        )
        for temperature in options.temperature
        for method in options.method
        for gamma in options.gamma
    ]
    prompts = prove.more(bench.load_prompts(), options.prompts)
    findings = [prove.Finding(recipe) for recipe in recipes]
    progress = bench.Progress()
    for i, _ in enumerate(prove.prove(findings, prompts, Shelf()), 1):
        progress.show(f"{i} of {len(prompts)} prompts")
    progress.over()
    print(prove.markdown(findings))
    parted = [(finding, *where) for finding in findings for where in finding.parted]
    for finding, name, token in parted:
        print(f"{bench.label(finding.recipe)} parts from plain decoding on {name} at token {token + 1}")
    return 1 if parted else 0


def _layers(options: argparse.Namespace) -> int:
    _some("prompts", options.prompts)
    recipe = Recipe(method="self", **given(options))
    texts = [prompt.text for prompt in bench.load_prompts(kinds=["code"])[: options.prompts]]
    found = []
    print("layers left out, alpha, c, best gamma, Theorem 3.8", file=sys.stderr)
    for thinned in layers.search(Shelf().take(recipe.target_spec), texts):
        found.append(thinned)
        skipped = " ".join(map(str, thinned.skipped))
        print(f"{skipped:<40} {thinned.alpha:.3f}  {thinned.c:.3f}  {thinned.gamma}  {thinned.speedup:.2f}", flush=True)
    best = max(found, key=lambda thinned: thinned.speedup, default=None)
    if best is None:
        raise Refused(f"{recipe.models[0]} has no layer to spare: choose a deeper model")
    if not best.gamma:
        print("no set of layers left out makes drafting pay on these texts: choose another method")
        return 0
    flags = " ".join(f"--skip-layer {i}" for i in best.skipped)
    print(f"best: --method self --gamma {best.gamma} {flags}")
    return 0


def _stores(options: argparse.Namespace) -> int:
    tokenizer = Shelf().take(Recipe(method="nasd").target_spec).tokenizer
    text = stores.stdlib_tokens(
        lambda source: tokenizer.encode(source, verbose=False), max(stores.SIZES) + 2 * stores.NEW
    )
    print(stores.markdown(list(stores.measure(text))))
    return 0


def _preflight(options: argparse.Namespace) -> int:
    recipe = Recipe(**{**given(options), "top_p": 1.0})
    found = preflight(recipe, texts_for(recipe, options.kind), Shelf())
    print(f"weights {found.weight_bytes / 1e6:,.0f} MB, keys and values {found.kv_bytes / 1e6:.2f} MB per 1,000 tokens")
    print(f"alpha {found.alpha:.2f}  c {found.c:.2f}  " + "  ".join(f"v({n}) {v:.2f}" for n, v in found.v.items()))
    for one in found.estimates:
        print(
            f"gamma {one.gamma}: {one.tokens_per_pass:.2f} tokens per pass, "
            f"{one.speedup:.2f}x [{one.low:.2f}, {one.high:.2f}]"
        )
    print(found.advice)
    return 0


def _foretold(options: argparse.Namespace) -> int:
    varying = ("method", "temperature")
    common = {name: value for name, value in given(options).items() if name not in varying} | {"top_p": 1.0}
    shelf = Shelf()
    if options.write:
        write(Recipe(**common, method="ar"), shelf)
        return 0
    _some("repeat", options.repeat)
    prompts = bench.load_prompts(kinds=options.kind)
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    if options.prompts is not None:
        _some("prompts", options.prompts)
        prompts = [one for kind in kinds for one in prove.more(bench.load_prompts(kinds=[kind]), options.prompts)]
    found = []
    for temperature in options.temperature:
        recipes = [Recipe(**common, method=method, temperature=temperature) for method in options.method]
        asked = foretold.ask(recipes, kinds, shelf)
        plain = replace(recipes[0], method="ar")
        items = bench.measure([plain, *recipes], prompts, shelf, repeat=options.repeat)
        found += foretold.compare(asked, recipes, [item for item in items if isinstance(item, dict)])
    print(foretold.markdown(found))
    target = recipes[0].models[0]
    itself = Recipe(**{**common, "pair": None, "target": target, "drafter": target}, temperature=options.temperature[0])
    print(f"the target drafting for itself: {preflight(itself, texts_for(itself, kinds[:1]), shelf).advice}")
    print(foretold.as_json(found))
    return 0


def _regret(options: argparse.Namespace) -> int:
    _some("runs", options.runs)
    varying = ("method", "policy", "temperature")
    common = {name: value for name, value in given(options).items() if name not in varying} | {"top_p": 1.0}
    kinds = list(dict.fromkeys(prompt.kind for prompt in bench.load_prompts(kinds=options.kind)))
    shelf, found = Shelf(), []
    for method in options.method:
        for policy in options.policy:
            for temperature in options.temperature:
                recipe = Recipe(**common, method=method, policy=policy, temperature=temperature)
                found += regret.study(recipe, kinds, shelf, options.runs)
    print(regret.markdown(found))
    print(regret.as_json(found))
    return 0


def _some(what: str, count: int) -> None:
    if count < 1:
        raise Refused(f"{what} must be at least 1, not {count}")


def _costs(options: argparse.Namespace) -> int:
    _some("rounds", options.rounds)
    target = Shelf().take(Recipe(method="ar", **given(options)).target_spec)
    longest = CachedModel(target.model).context
    if max(options.context) + max(options.rows) > longest or min(*options.context, *options.rows) < 1:
        raise Refused(f"contexts and rows must be 1 or more and fit the model's {longest:,} tokens together")
    found = pass_seconds(target.model, options.rows, options.context, options.rounds)
    print("| rows | " + " | ".join(f"{context:,} tokens" for context in options.context) + " |")
    print("|---" * (len(options.context) + 1) + "|")
    first = options.rows[0]
    for n in options.rows:
        cells = []
        for context in options.context:
            ratios = [own / one for own, one in zip(found[n, context], found[first, context], strict=True)]
            low, high = interval(ratios)
            ratio = "1" if n == first else f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"
            cells.append(f"{1000 * statistics.median(found[n, context]):.2f} ms, {ratio}")
        print(f"| {n} | " + " | ".join(cells) + " |")
    print(f"milliseconds of a pass, and how many passes over {first} row(s) that is at the same context [95 %]")
    return 0


def _serve(options: argparse.Namespace) -> int:
    if min(options.budget_mb, options.contexts, options.queue) < 1 or not (options.body_mb > 0 and options.rate >= 0):
        raise Refused("budget, contexts, queue and body must be above 0, and rate not below it")
    for path in (options.certificate, options.key):
        if path is not None and not path.is_file():
            raise Refused(f"there is no file {path}: give certificate and key as PEM files")
    spec = Recipe(method="ar", **given(options)).target_spec
    target = Shelf().take(spec)
    if target.encoder:
        raise Refused("a model with an encoder is not served, for its prompt would have to travel apart: run it here")
    listener = bind(options.host, options.port)
    app = application(
        target,
        token=os.environ.get(TOKEN),
        budget_bytes=options.budget_mb << 20,
        most=options.contexts,
        expiry_s=options.expiry_s,
        limits=Limits(int(options.body_mb * (1 << 20)), options.rate),
        waiting=options.queue,
    )
    if TOKEN not in os.environ and options.host not in ("127.0.0.1", "::1", "localhost"):
        print(f"anyone who can reach {options.host} may use this: set {TOKEN} to ask for a token", file=sys.stderr)
    listener.listen()  # whoever hears the next line may come at once
    scheme = "https" if options.certificate else "http"
    print(f"listening on {scheme}://{options.host}:{listener.getsockname()[1]}", flush=True)
    listen(
        app, listener, options.certificate, options.key, leash=sys.stdin.buffer if options.until_stdin_ends else None
    )
    return 0


COMMANDS = {
    "serve": _serve,
    "preflight": _preflight,
    "costs": _costs,
    "bench": _bench,
    "prove": _prove,
    "foretold": _foretold,
    "regret": _regret,
    "layers": _layers,
    "stores": _stores,
}
