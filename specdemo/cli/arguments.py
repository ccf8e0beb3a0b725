"""The command line: names are checked by `Recipe`, which lists the known ones."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from specdemo.core.errors import UserError
from specdemo.models.spec import DTYPES, QUANTIZATIONS
from specdemo.models.zoo import PAIRS
from specdemo.recipe import METHODS, NGRAM_LEVELS, POLICIES, RULES, Recipe
from specdemo.remote.config import ALWAYS, ENCODINGS, MODES, ON_LOSS, Q_ROWS, SIGNALS, CloudConfig


class Parser(argparse.ArgumentParser):
    """Errors in one line, exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """One line, no usage block."""
        self.exit(2, f"specdemo: {message}\n")


def _names(known: dict[str, object]) -> str:
    return ", ".join(known)


def add_model_options(command: argparse.ArgumentParser) -> None:
    """Add the options that select and load models."""
    add = command.add_argument
    add("--pair", help=f"a ready pair: {_names(PAIRS)} (default: bundled)")
    add("--target", metavar="M", help="Hugging Face id or local directory")
    add("--drafter", metavar="M", help="Hugging Face id or local directory")
    add(
        "--universal",
        action="store_const",
        const=True,
        help="re-encode the text of a drafter of another vocabulary",
    )
    add("--dtype", help=_names(DTYPES))
    add("--quantization", help=f"of the target: {_names(QUANTIZATIONS)}")
    add("--drafter-quantization", help=f"of the drafter: {_names(QUANTIZATIONS)}")
    add("--device", help="auto, cpu, cuda, cuda:N, mps, or spread over all")
    add("--drafter-device", metavar="DEVICE", help="of the drafter, if not the target's")


def add_cloud_options(command: argparse.ArgumentParser) -> None:
    """Add the options of edge-cloud decoding."""
    add = command.add_argument
    add("--remote", metavar="URL", help="the target is a service (see serve) at this address")
    add("--mode", help=f"with --remote: {_names(MODES)}")
    add("--encoding", help=f"on the wire: {_names(ENCODINGS)}")
    add("--q-rows", help=f"how the drafter's law travels: {_names(Q_ROWS)}")
    add("--deadline-ms", type=float, help="of a round (default: 400)")
    add("--provisional", action="store_const", const=True, help="past it commit the draft's first token (lossy)")
    add("--lost-after-s", type=float, help="without any answer the cloud is lost (default: 30)")
    add("--on-loss", help=f"then: {_names(ON_LOSS)}")
    add("--rtt-ms", type=float, help="emulated, on top of the link that there is")
    add("--jitter-ms", type=float, help="emulated, each way")
    add("--loss", type=float, help="emulated: share of messages that never come")
    add("--up-mbit", type=float, help="emulated, per second")
    add("--down-mbit", type=float, help="emulated, per second")
    gates = _names(SIGNALS | ALWAYS)
    add("--gate", dest="gates", nargs="+", metavar="G", help=f"ask the cloud only for (lossy): {gates}")
    add("--gate-nll", type=float, help="hard above, nats")
    add("--gate-entropy", type=float, help="hard above, bits")
    add("--gate-margin", type=float, help="hard below")
    add("--gate-variance", type=float, help="hard above")
    add("--gate-ratio", type=float, help="of a draft that may be hard")


def parser() -> Parser:
    """All commands and their options."""
    top = Parser(prog="specdemo", description="See, measure and trust speculative decoding.")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser)
    run = commands.add_parser("run", help="continue a prompt, showing what was accepted, rejected and corrected")
    run.add_argument("prompt", help="text to continue; - reads standard input")
    add = run.add_argument
    add_model_options(run)
    add("--method", help=_names(METHODS))
    add("--gamma", type=int, help="longest draft")
    add("--policy", help=f"draft-length policy: {_names(POLICIES)}")
    add("--gamma-min", type=int, help="shortest draft of a policy that varies it")
    add("--gamma-max", type=int, help="longest draft of a policy that varies it")
    add("--rule", help=f"acceptance rule: {_names(RULES)}")
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
    add("--ngram-levels", help=f"NASD's storage: {_names(NGRAM_LEVELS)}")
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
    add_cloud_options(run)
    out = run.add_mutually_exclusive_group()
    out.add_argument("--json", action="store_true", help="the trace on standard output, nothing else")
    out.add_argument("--steps", action="store_true", help="each round in words instead of the text")
    run.add_argument("--trace", type=Path, metavar="FILE", help="also write the trace to a file")
    race = commands.add_parser("bench", help="recipes x prompts against plain decoding, paired and alternating")
    add_model_options(race)
    add_cloud_options(race)
    race.add_argument("--method", nargs="+", default=["draft", "nasd"], help=_names(METHODS))
    race.add_argument("--gamma", nargs="+", type=int, default=[2, 3, 4], help="draft lengths")
    race.add_argument("--policy", nargs="+", default=["fixed"], help=_names(POLICIES))
    race.add_argument("--rule", help=_names(RULES))
    race.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    race.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    race.add_argument("--max-tokens", type=int, default=128)
    race.add_argument("--repeat", type=int, default=1, metavar="N", help="every prompt N times, with another seed each")
    race.add_argument("--peers", action="store_true", help="transformers' own ways to decode the same weights too")
    race.add_argument("--output", type=Path, metavar="FILE", help="also write a report in Markdown")
    proof = commands.add_parser("prove", help="is the text that of plain decoding, token by token, on this machine?")
    add_model_options(proof)
    proof.add_argument("--method", nargs="+", default=["draft", "nasd"], help=_names(METHODS))
    proof.add_argument("--gamma", nargs="+", type=int, default=[1, 3, 5, 7], help="draft lengths")
    proof.add_argument(
        "--temperature", nargs="+", type=float, default=[0.0, 0.7, 1.3], help="above 0 with rule coupled"
    )
    proof.add_argument("--prompts", type=int, default=20)
    proof.add_argument("--max-tokens", type=int, default=64)
    ahead = commands.add_parser("preflight", help="will this pair help? nothing is generated")
    add_model_options(ahead)
    ahead.add_argument("--method", help="draft, self, nasd, suffix, lookup")
    ahead.add_argument("--exit-layer", type=int, metavar="K")
    ahead.add_argument("--skip-layer", dest="skip_layers", action="append", type=int, metavar="I")
    ahead.add_argument("--temperature", type=float, default=0.0)
    ahead.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    cloud = commands.add_parser("serve", help="judge other machines' drafts: the target as a service")
    add_model_options(cloud)
    cloud.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    cloud.add_argument("--port", type=int, default=8300, help="0 takes any that is free")
    cloud.add_argument("--certificate", type=Path, metavar="FILE", help="PEM; with it the service speaks TLS")
    cloud.add_argument("--key", type=Path, metavar="FILE", help="the certificate's")
    cloud.add_argument("--budget-mb", type=int, default=2048, help="of keys and values kept between rounds")
    cloud.add_argument("--contexts", type=int, default=256, help="texts kept between rounds")
    cloud.add_argument("--expiry-s", type=float, default=600, help="an unused text is kept this long")
    cloud.add_argument("--queue", type=int, default=64, help="rounds that may wait; more are told busy")
    cloud.add_argument("--rate", type=float, default=0, help="requests a second of one address; 0: no limit")
    cloud.add_argument("--body-mb", type=float, default=4, help="longest request")
    cloud.add_argument(
        "--until-stdin-ends", action="store_true", help="for a program that starts it: end when that does"
    )
    return top


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by the recipe's names."""
    values = _values(options, Recipe)
    wire = _values(options, CloudConfig)
    if "remote" in wire:
        values["cloud"] = CloudConfig(**wire)
    elif wire:
        raise UserError(f"{', '.join(wire)} has no meaning without --remote: say where the service is")
    return values


def _values(options: argparse.Namespace, kind: type) -> dict[str, Any]:
    values = {field.name: getattr(options, field.name, None) for field in fields(kind)}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if value is not None
    }
