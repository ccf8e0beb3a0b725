"""The terminal: ``python -m specdemo run PROMPT``, and ``bench``, ``prove`` and ``layers``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from specdemo import bench, layers, prove
from specdemo.bench import stores
from specdemo.core.errors import Refused
from specdemo.core.metrics import Metrics
from specdemo.generate import Record, ending, generate
from specdemo.models.load import DTYPES, QUANTIZATIONS, Shelf, find_device
from specdemo.models.pairs import PAIRS
from specdemo.models.peers import PEERS
from specdemo.recipe import METHODS, NGRAM_LEVELS, POLICIES, RULES, Recipe
from specdemo.views import Coloured, Json, Rounds


class Parser(argparse.ArgumentParser):
    """Errors in one line, exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """One line, no usage block."""
        self.exit(2, f"specdemo: {message}\n")


def parser() -> Parser:
    """The command line; names are checked by `Recipe`, which lists the known ones."""

    def names(known: dict[str, object]) -> str:
        return ", ".join(known)

    def models(command: argparse.ArgumentParser) -> None:
        add = command.add_argument
        add("--pair", help=f"a ready pair: {names(PAIRS)} (default: bundled)")
        add("--target", metavar="M", help="Hugging Face id or local directory")
        add("--drafter", metavar="M", help="Hugging Face id or local directory")
        add("--dtype", help=names(DTYPES))
        add("--quantization", help=f"of the target: {names(QUANTIZATIONS)}")
        add("--drafter-quantization", help=f"of the drafter: {names(QUANTIZATIONS)}")
        add("--device", help="auto, cpu, cuda, cuda:N or mps")

    top = Parser(prog="specdemo", description="See, measure and trust speculative decoding.")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser)
    run = commands.add_parser("run", help="continue a prompt, showing what was accepted, rejected and corrected")
    run.add_argument("prompt", help="text to continue; - reads standard input")
    add = run.add_argument
    models(run)
    add("--method", help=names(METHODS))
    add("--gamma", type=int, help="longest draft")
    add("--policy", help=f"draft-length policy: {names(POLICIES)}")
    add("--gamma-min", type=int, help="shortest draft of a policy that varies it")
    add("--gamma-max", type=int, help="longest draft of a policy that varies it")
    add("--rule", help=f"acceptance rule: {names(RULES)}")
    add("--threshold", type=float, help="of a rule that has one")
    add("--temperature", type=float, help="0 is greedy")
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--repetition-penalty", type=float)
    add("--bad-word", dest="bad_words", action="append", metavar="TEXT", help="text never to produce; may be repeated")
    add("--seed", type=int)
    add("--max-tokens", type=int)
    add("--top", type=int, metavar="N", help="write the N likeliest tokens of every law into the trace")
    add("--ngram", type=int, metavar="N", help="order of NASD's n-grams")
    add("--ngram-levels", help=f"NASD's storage: {names(NGRAM_LEVELS)}")
    add("--filler-top-k", type=int, metavar="K", help="target choices that NASD learns per position; 1 is NAPD")
    add("--tree-nodes", type=int, metavar="N", help="most nodes of a draft of method tree")
    add("--tree-width", type=int, metavar="N", help="children per node")
    add("--lookahead-window", type=int, metavar="N", help="places ahead that lookahead guesses at")
    add("--lookahead-n", type=int, metavar="N", help="tokens of its n-grams")
    add("--lookahead-guesses", type=int, metavar="N", help="n-grams that it drafts per round")
    add("--num-beams", type=int, metavar="N", help="running beams of method beam")
    add("--length-penalty", type=float, help="of method beam: above 0 favours longer texts")
    add("--min-length", type=int, metavar="N", help="tokens before which no beam may end")
    add("--exit-layer", type=int, metavar="K", help="self-speculation keeps the first K layers (default: half)")
    add("--skip-layer", dest="skip_layers", action="append", type=int, metavar="I", help="or all but these")
    add("--skip-sample-adjustment", action="store_const", const=True, help="corrections straight from p (lossy)")
    out = run.add_mutually_exclusive_group()
    out.add_argument("--json", action="store_true", help="the trace on standard output, nothing else")
    out.add_argument("--steps", action="store_true", help="each round in words instead of the text")
    run.add_argument("--trace", type=Path, metavar="FILE", help="also write the trace to a file")
    race = commands.add_parser("bench", help="recipes x prompts against plain decoding, paired and alternating")
    models(race)
    race.add_argument("--method", nargs="+", default=["draft", "nasd"], help=names(METHODS))
    race.add_argument("--gamma", nargs="+", type=int, default=[2, 3, 4], help="draft lengths")
    race.add_argument("--policy", nargs="+", default=["fixed"], help=names(POLICIES))
    race.add_argument("--rule", help=names(RULES))
    race.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    race.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    race.add_argument("--max-tokens", type=int, default=128)
    race.add_argument("--peers", action="store_true", help="transformers' own ways to decode the same weights too")
    race.add_argument("--output", type=Path, metavar="FILE", help="also write the table to a Markdown file")
    proof = commands.add_parser("prove", help="is the text that of plain decoding, token by token, on this machine?")
    models(proof)
    proof.add_argument("--method", nargs="+", default=["draft", "nasd"], help=names(METHODS))
    proof.add_argument("--gamma", nargs="+", type=int, default=[1, 3, 5, 7], help="draft lengths")
    proof.add_argument(
        "--temperature", nargs="+", type=float, default=[0.0, 0.7, 1.3], help="above 0 with rule coupled"
    )
    proof.add_argument("--prompts", type=int, default=20)
    proof.add_argument("--max-tokens", type=int, default=64)
    thin = commands.add_parser("layers", help="which layers self-speculation can do without")
    models(thin)
    thin.add_argument("--prompts", type=int, default=6)
    commands.add_parser("stores", help="what drafting from n-grams and suffixes costs as the text grows")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 for a run that failed, 2 for bad input, 130 for Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        if options.command in COMMANDS:
            return COMMANDS[options.command](options)
        recipe = Recipe(**_given(options))
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        with _open(options.trace) as trace:
            return _run(generate(recipe, prompt, Shelf()), options, trace)
    except Refused as refusal:
        print(f"specdemo: {refusal}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever was reading has had enough
        sys.stderr.close()
        return 0


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by the recipe's names."""
    values = {field.name: getattr(options, field.name, None) for field in fields(Recipe)}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if value is not None
    }


def _bench(options: argparse.Namespace) -> int:
    varying = ("method", "gamma", "policy", "temperature")
    common = {name: value for name, value in _given(options).items() if name not in varying}
    common["top_p"] = 1.0  # the whole law: alpha is then comparable with the papers
    recipes = []
    for temperature in options.temperature:
        varied: list[dict[str, Any]] = [{"method": "ar"}]
        for method in options.method:
            for policy in options.policy if method != "ar" else ():
                lengths = options.gamma if policy == "fixed" else options.gamma[-1:]
                varied += [{"method": method, "policy": policy, "gamma": gamma} for gamma in lengths]
        recipes += [Recipe(**{**common, **one, "temperature": temperature}) for one in varied]
    prompts = bench.load_prompts(kinds=options.kind)
    peers = []
    if options.peers:
        drafting = any(recipe.drafter_spec for recipe in recipes)
        peers = [name for name, peer in PEERS.items() if drafting or peer.assistant is None]
    records = []
    for record in bench.measure(recipes, prompts, Shelf(), peers):
        records.append(record)
        print(f"\r{len(records)} of {len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    bandwidth = bench.copy_bandwidth(find_device(recipes[0].device))
    rows = bench.table(recipes, records, peers, bandwidth)
    print(bench.markdown(rows))
    for row in rows:
        if row.slower:
            print(f"slower than plain: {row.lane} on {', '.join(row.slower)}")
    print(f"copy bandwidth of this machine: {bandwidth / 1e9:.1f} GB/s")
    print(bench.as_json(rows))
    if options.output:
        options.output.write_text(bench.markdown(rows) + "\n", encoding="utf-8")
    return 0


def _prove(options: argparse.Namespace) -> int:
    common = {name: value for name, value in _given(options).items() if name not in ("method", "gamma", "temperature")}
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
    for i, _ in enumerate(prove.prove(findings, prompts, Shelf()), 1):
        print(f"\r{i} of {len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(prove.markdown(findings))
    parted = [(finding, *where) for finding in findings for where in finding.parted]
    for finding, name, token in parted:
        print(f"{bench.label(finding.recipe)} parts from plain decoding on {name} at token {token + 1}")
    return 1 if parted else 0


def _layers(options: argparse.Namespace) -> int:
    recipe = Recipe(method="self", **_given(options))
    texts = [prompt.text for prompt in bench.load_prompts(kinds=["code"])[: options.prompts]]
    found = []
    print("layers left out, alpha, c, best gamma, Theorem 3.8", file=sys.stderr)
    for thinned in layers.search(Shelf().take(recipe.target_spec), texts):
        found.append(thinned)
        skipped = " ".join(map(str, thinned.skipped))
        print(f"{skipped:<40} {thinned.alpha:.3f}  {thinned.c:.3f}  {thinned.gamma}  {thinned.speedup:.2f}", flush=True)
    best = max(found, key=lambda thinned: thinned.speedup)
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


COMMANDS = {"bench": _bench, "prove": _prove, "layers": _layers, "stores": _stores}


def _open(path: Path | None) -> AbstractContextManager[TextIO | None]:
    if path is None:
        return nullcontext()
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise Refused(f"cannot write the trace to {path}: {error.strerror}") from error


def _run(records: Iterator[Record], options: argparse.Namespace, trace: TextIO | None) -> int:
    view = Json() if options.json else Rounds() if options.steps else Coloured()
    metrics = Metrics()
    began = False

    def put(record: Record) -> None:
        if trace:
            trace.write(json.dumps(record) + "\n")
        view.show(record)

    try:
        for record in records:
            if "phase" in record:
                print(f"{record['text']} ...", file=sys.stderr)
                continue
            began = True
            if "i" in record:
                metrics.add_record(record)
            put(record)
    except KeyboardInterrupt:
        if began:
            put(ending("cancelled", metrics))
        return 130
    if record["end"] == "error":
        print(f"specdemo: the run failed: {record['error']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
