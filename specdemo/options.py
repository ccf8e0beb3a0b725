"""The command line: names are checked by `Recipe`, which lists the known ones."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from specdemo.models.pairs import PAIRS
from specdemo.models.spec import DTYPES, QUANTIZATIONS
from specdemo.recipe import METHODS, NGRAM_LEVELS, POLICIES, RULES, Recipe


class Parser(argparse.ArgumentParser):
    """Errors in one line, exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """One line, no usage block."""
        self.exit(2, f"specdemo: {message}\n")


def parser() -> Parser:
    """All commands and their options."""

    def names(known: dict[str, object]) -> str:
        return ", ".join(known)

    def models(command: argparse.ArgumentParser) -> None:
        add = command.add_argument
        add("--pair", help=f"a ready pair: {names(PAIRS)} (default: bundled)")
        add("--target", metavar="M", help="Hugging Face id or local directory")
        add("--drafter", metavar="M", help="Hugging Face id or local directory")
        add(
            "--universal",
            action="store_const",
            const=True,
            help="re-encode the text of a drafter of another vocabulary",
        )
        add("--dtype", help=names(DTYPES))
        add("--quantization", help=f"of the target: {names(QUANTIZATIONS)}")
        add("--drafter-quantization", help=f"of the drafter: {names(QUANTIZATIONS)}")
        add("--device", help="auto, cpu, cuda, cuda:N, mps, or spread over all")
        add("--drafter-device", metavar="DEVICE", help="of the drafter, if not the target's")

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
    add(
        "--chat",
        action="store_true",
        default=None,
        help="the prompt is said by a user, in the chat template of the model",
    )
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
    race.add_argument("--repeat", type=int, default=1, metavar="N", help="every prompt N times, with another seed each")
    race.add_argument("--peers", action="store_true", help="transformers' own ways to decode the same weights too")
    race.add_argument("--output", type=Path, metavar="FILE", help="also write a report in Markdown")
    proof = commands.add_parser("prove", help="is the text that of plain decoding, token by token, on this machine?")
    models(proof)
    proof.add_argument("--method", nargs="+", default=["draft", "nasd"], help=names(METHODS))
    proof.add_argument("--gamma", nargs="+", type=int, default=[1, 3, 5, 7], help="draft lengths")
    proof.add_argument(
        "--temperature", nargs="+", type=float, default=[0.0, 0.7, 1.3], help="above 0 with rule coupled"
    )
    proof.add_argument("--prompts", type=int, default=20)
    proof.add_argument("--max-tokens", type=int, default=64)
    ahead = commands.add_parser("preflight", help="will this pair help? nothing is generated")
    models(ahead)
    ahead.add_argument("--method", help="draft, self, nasd, suffix, lookup")
    ahead.add_argument("--exit-layer", type=int, metavar="K")
    ahead.add_argument("--skip-layer", dest="skip_layers", action="append", type=int, metavar="I")
    ahead.add_argument("--temperature", type=float, default=0.0)
    ahead.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    truth = commands.add_parser("foretold", help="what preflight foretells beside what is then measured")
    models(truth)
    truth.add_argument(
        "--method", nargs="+", default=["draft", "nasd", "self"], help="draft, self, nasd, suffix, lookup"
    )
    truth.add_argument("--gamma", type=int, default=3)
    truth.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    truth.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    truth.add_argument("--max-tokens", type=int, default=64)
    truth.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="every prompt N times, with another seed each"
    )
    truth.add_argument("--write", action="store_true", help="let the target write anew the texts that are read")
    thin = commands.add_parser("layers", help="which layers self-speculation can do without")
    models(thin)
    thin.add_argument("--prompts", type=int, default=6)
    costs = commands.add_parser("costs", help="what a pass of the target costs, by rows and by context")
    models(costs)
    costs.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 6, 8])
    costs.add_argument("--context", nargs="+", type=int, default=[128, 512, 1024, 2040])
    commands.add_parser("stores", help="what drafting from n-grams and suffixes costs as the text grows")
    return top


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by the recipe's names."""
    values = {field.name: getattr(options, field.name, None) for field in fields(Recipe)}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if value is not None
    }
