"""The terminal: ``python -m specdemo run PROMPT``, ``python -m specdemo bench``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from specdemo import bench
from specdemo.core.errors import Refused
from specdemo.core.metrics import Metrics
from specdemo.generate import Record, ending, generate
from specdemo.models.load import DTYPES, QUANTIZATIONS, Shelf, find_device
from specdemo.models.pairs import PAIRS
from specdemo.models.peers import PEERS
from specdemo.recipe import METHODS, NGRAM_LEVELS, POLICIES, RULES, Recipe

# Colour never stands alone: rejected tokens are struck through, corrections underlined.
STYLES = {
    "accepted": "\x1b[32m",
    "rejected": "\x1b[31;9m",
    "ignored": "\x1b[90;9m",
    "correction": "\x1b[34;4m",
    "bonus": "\x1b[36;4m",
    "plain": "",
}
RESET = "\x1b[0m"


class Parser(argparse.ArgumentParser):
    """Errors in one line, exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """One line, no usage block."""
        self.exit(2, f"specdemo: {message}\n")


def parser() -> Parser:
    """The command line; names are checked by `Recipe`, which lists the known ones."""

    def names(known: dict[str, object]) -> str:
        return ", ".join(known)

    top = Parser(prog="specdemo", description="See, measure and trust speculative decoding.")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser)
    run = commands.add_parser("run", help="continue a prompt, showing what was accepted, rejected and corrected")
    run.add_argument("prompt", help="text to continue; - reads standard input")
    add = run.add_argument
    add("--pair", help=f"a ready pair: {names(PAIRS)} (default: bundled)")
    add("--target", metavar="M", help="Hugging Face id or local directory")
    add("--drafter", metavar="M", help="Hugging Face id or local directory")
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
    add("--dtype", help=names(DTYPES))
    add("--quantization", help=f"of the target: {names(QUANTIZATIONS)}")
    add("--drafter-quantization", help=f"of the drafter: {names(QUANTIZATIONS)}")
    add("--device", help="auto, cpu, cuda, cuda:N or mps")
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
    race.add_argument("--pair", help=f"a ready pair: {names(PAIRS)} (default: bundled)")
    race.add_argument("--target", metavar="M", help="Hugging Face id or local directory")
    race.add_argument("--drafter", metavar="M", help="Hugging Face id or local directory")
    race.add_argument("--method", nargs="+", default=["draft", "nasd"], help=names(METHODS))
    race.add_argument("--gamma", nargs="+", type=int, default=[2, 3, 4], help="draft lengths")
    race.add_argument("--policy", nargs="+", default=["fixed"], help=names(POLICIES))
    race.add_argument("--rule", help=names(RULES))
    race.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    race.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    race.add_argument("--max-tokens", type=int, default=128)
    race.add_argument("--dtype", help=names(DTYPES))
    race.add_argument("--device", help="auto, cpu, cuda, cuda:N or mps")
    race.add_argument("--peers", action="store_true", help="transformers' own ways to decode the same weights too")
    race.add_argument("--output", type=Path, metavar="FILE", help="also write the table to a Markdown file")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 for a run that failed, 2 for bad input, 130 for Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        if options.command == "bench":
            return _bench(options)
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


def _open(path: Path | None) -> AbstractContextManager[TextIO | None]:
    if path is None:
        return nullcontext()
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise Refused(f"cannot write the trace to {path}: {error.strerror}") from error


def _run(records: Iterator[Record], options: argparse.Namespace, trace: TextIO | None) -> int:
    view = Json() if options.json else Steps() if options.steps else Coloured()
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


class Json:
    """The trace as it is."""

    def show(self, record: Record) -> None:
        """One line a record."""
        print(json.dumps(record), flush=True)


class Coloured:
    """Text in colour as it comes, then a summary."""

    def show(self, record: Record) -> None:
        """Print a record's share of the text, or the summary."""
        if "specdemo" in record:
            self._exact = record["exact"]
            print(record["prompt"], end="", flush=True)
        elif "i" in record:
            print("".join(_spans(record)), end="", flush=True)
        else:
            print(f"\n\n{summary(record['metrics'])}  {'exact' if self._exact else 'LOSSY'}  end: {record['end']}")


def _spans(step: Record) -> Iterator[str]:
    """The round's tokens, styled; the drafts that were not kept stand before the correction."""
    accepted = set(step["accepted"])
    kept = len(accepted)
    for piece in step["pieces"][:kept]:
        yield f"{STYLES['accepted']}{piece}{RESET}"
    for node, piece in enumerate(step["draft_text"]):
        if node not in accepted:
            style = STYLES["ignored" if step["beta"][node] is None else "rejected"]
            shown = piece.replace("\n", "\u23ce")  # a rejected line break must not break the line
            yield f"{style}{shown}{RESET}"
    for piece in step["pieces"][kept:]:
        yield f"{STYLES[step['kind']]}{piece}{RESET}"


class Steps:
    """Each round in words: position, gamma, every draft with q, p and its fate, the last token."""

    def show(self, record: Record) -> None:
        """Print one round."""
        if "specdemo" in record:
            self._position = len(record["prompt_tokens"])
        elif "i" in record:
            print(self._round(record), flush=True)
            self._position += len(record["tokens"])
        else:
            print(f"\n{summary(record['metrics'])}  end: {record['end']}")

    def _round(self, step: Record) -> str:
        accepted = set(step["accepted"])
        lines = [
            f"--- round {step['i']}  position {self._position}  gamma {step['gamma']}  "
            f"drafted {len(step['draft'])}  accepted {len(accepted)} ---"
        ]
        for node, text in enumerate(step["draft_text"]):
            q = 1.0 if step["q"] is None else step["q"][node]
            p, draw = step["p"][node], step["draw"][node]
            ratio = min(1.0, p / q) if q else 0.0
            if node in accepted:
                fate = f"accepted: draw {draw:.3f} < {ratio:.3f}" if draw is not None else "accepted: the first choice"
            elif step["beta"][node] is None:
                fate = "not tested: an earlier draft was rejected"
            elif draw is None:
                fate = "rejected: not the first choice"
            else:
                fate = f"rejected: draw {draw:.3f} >= {ratio:.3f}"
            lines.append(f"  {text!r:>16}  q={q:.3f}  p={p:.3f}  min(1,p/q)={ratio:.3f}  {fate}")
        if "pending" in step:
            lines.append(f"  settled {step['text']!r}  best beam goes on {step['pending_text']!r}")
        if step["token"] is not None:
            lines.append(f"  {step['pieces'][-1]!r:>16}  {step['kind']}")
        return "\n".join(lines)


def summary(metrics: Record) -> str:
    """The figures in one line; a dash where there is nothing to divide by."""

    def number(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    return (
        f"{metrics['tokens']} tokens  {number('tokens_per_second', '.1f')} tokens/s  "
        f"accepted {metrics['accepted']}/{metrics['drafted']} drafted ({number('acceptance_rate', '.0%')})  "
        f"alpha {number('mean_beta', '.2f')}  {number('tokens_per_target_pass', '.2f')} tokens/pass  "
        f"first token {number('ttft_s', '.3f')} s"
    )


if __name__ == "__main__":
    sys.exit(main())
