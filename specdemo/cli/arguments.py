"""Argument parser of the terminal; flags of recipe options derive from the schema."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdemo.core.errors import UserError
from specdemo.core.options import Option, removal
from specdemo.models.spec import SAME
from specdemo.models.zoo import CHAT_PAIR, PAIRS, first_installed
from specdemo.option_rules import refuse_ineffective, settings_of_pair
from specdemo.recipe import PRESETS, Recipe
from specdemo.remote.config import CloudConfig
from specdemo.worker import MOST_TEXTS

ALL_OPTIONS = {**Recipe.OPTIONS, **CloudConfig.OPTIONS}
MODEL_OPTIONS = ["pair", *(name for name, option in Recipe.OPTIONS.items() if option.group == "Models and devices")]


class Parser(argparse.ArgumentParser):
    """Parser with single-line errors and exit code 2."""

    @property
    def arguments(self) -> list[argparse.Action]:
        return self._actions

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"specdemo: {message}\n")


def parser() -> Parser:
    top = Parser(prog="specdemo", description="Visualise, measure and verify speculative decoding.")
    commands = top.add_subparsers(dest="command", required=True, parser_class=Parser)
    for name, (title, add_arguments) in ARGUMENTS.items():
        add_arguments(commands.add_parser(name, help=title))
    return top


def add_model_options(command: argparse.ArgumentParser) -> None:
    _add_options(command, *MODEL_OPTIONS)


def _add_options(command: argparse.ArgumentParser, *names: str, many: bool = False, **defaults: Any) -> None:
    """Add the flags of options; with `many`, they take lists without a default."""
    for option in map(ALL_OPTIONS.__getitem__, names):
        if not option.terminal:
            continue
        default = defaults.get(option.name)
        properties: dict[str, Any] = {"dest": option.name, "help": option_help(option, default)}
        if option.type is bool and (option.default or option.name in PAIRS[CHAT_PAIR].settings):
            command.add_argument(option.flag, action=argparse.BooleanOptionalAction, **properties)
            continue
        if option.type is bool:
            command.add_argument(option.flag, action="store_const", const=True, **properties)
            continue
        properties |= {"type": option.item_type, "metavar": option.metavar, "default": default}
        if many or isinstance(default, list) or (option.many and option.choices):
            properties["nargs"] = "+"
        elif option.many:
            properties["action"] = "append"
        command.add_argument(option.flag, **properties)


def _add_cloud_options(command: argparse.ArgumentParser) -> None:
    _add_options(command, *CloudConfig.OPTIONS)
    for name, remedy in CloudConfig.REMOVED.items():
        command.add_argument(f"--{name.replace('_', '-')}", help=argparse.SUPPRESS, type=_refusal(name, remedy))


def _refusal(name: str, remedy: str) -> Callable[[str], object]:
    """Return the conversion of a value of a removed option, which raises an error."""

    def refuse(value: str) -> object:
        raise argparse.ArgumentTypeError(removal(name, remedy))

    return refuse


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def option_help(option: Option, default: Any) -> str:
    default = option.default if default is None else default
    shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
    parts = [option.help + (": " + ", ".join(option.choices) if option.choices else "")]
    if option.lossy:
        parts.append("(lossy)")
    if shown not in (None, "", False) and "default:" not in option.help:
        parts.append(f"(default: {shown})")
    return " ".join(parts)


def _run(command: Parser) -> None:
    command.add_argument("prompt", help="text to continue; - for standard input")
    _add_options(command, *Recipe.OPTIONS)
    _add_cloud_options(command)
    output = command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="write the trace to standard output, without other text")
    output.add_argument("--steps", action="store_true", help="explain each step instead of showing the text")
    output.add_argument("--raw", action="store_true", help="also show the chat template around the message")
    _add_display_options(command)
    command.add_argument("--ledger", action="store_true", help="at the end, split the wall time by cause")
    command.add_argument("--trace", type=Path, metavar="FILE", help="also write the trace to a file")


def _chat(command: Parser) -> None:
    _add_options(command, *Recipe.OPTIONS)
    _add_cloud_options(command)
    _add_display_options(command)


def _add_display_options(command: Parser) -> None:
    command.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        metavar="WHEN",
        default="auto",
        help="colours and rejected tokens: auto (terminals, unless NO_COLOR is set), always or never (default: auto)",
    )
    presets = "; ".join(f"{name}: {preset.title}" for name, preset in PRESETS.items())
    command.add_argument(
        "--preset", metavar="NAME", help=f"values of several options; other flags override it. {presets}"
    )


def _bench(command: Parser) -> None:
    _add_options(command, "pair", many=True)
    _add_options(command, *MODEL_OPTIONS[1:])
    varied: dict[str, Any] = {
        "method": ["draft", "nasd"],
        "gamma": [2, 3, 4],
        "policy": ["fixed"],
        "temperature": [0.0],
    }
    _add_options(command, *varied, "rule", "max_tokens", **varied, max_tokens=128)
    _add_options(command, "external", "ngram", "filler_top_k", "filler_weight", "corpus_order", many=True)
    _add_cloud_options(command)
    add = command.add_argument
    add("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    add("--prompts", type=Path, metavar="FILE", help="questions as JSON Lines: question_id, category and turns")
    add("--repeat", type=positive, default=1, metavar="N", help="runs per prompt, each with another seed")
    add("--peers", action="store_true", help="also measure the assisted decoding of transformers")
    add("--output", type=Path, metavar="FILE", help="also write a report in Markdown")


def _prove(command: Parser) -> None:
    add_model_options(command)
    varied: dict[str, Any] = {"method": ["draft", "nasd"], "gamma": [1, 3, 5, 7], "temperature": [0.0, 0.7, 1.3]}
    _add_options(command, *varied, "max_tokens", **varied, max_tokens=64)
    command.add_argument("--rule", help="acceptance rule (default: one that reproduces the text)")
    command.add_argument("--prompts", type=positive, default=20, help="number of prompts")
    _add_options(command, "external")
    command.add_argument("--bundle", type=Path, metavar="FILE", help="also write a proof bundle")


def _check_bundle(command: Parser) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="proof bundle of prove --bundle")
    names = ("pair", "target", "drafter", "head", "device", "drafter_device", "external")
    _add_options(command, *names)


def _preflight(command: Parser) -> None:
    add_model_options(command)
    _add_options(command, "method", "exit_layer", "skip_layers", "temperature", temperature=0.0)
    command.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")


def _fit(command: Parser) -> None:
    add = command.add_argument
    add("model", metavar="TARGET", nargs="?", help="pair, hub id in the cache, directory or GGUF file")
    files = "drafters: GGUF files, directories, hub ids in the cache (default: all models of this machine)"
    add("files", metavar="FILE", nargs="*", help=files)
    names = ("temperature", "chat", "dtype", "quantization", "drafter_quantization", "activations", "device")
    _add_options(command, *names, temperature=0.0)
    add("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    add("--quick", action="store_true", help="compare files only: no model is loaded and no speed is predicted")
    add("--json", action="store_true", help="write a JSON object to standard output, without other text")
    add("--directories", action="store_true", help="list the directories that are searched, and end")


def _calibrate(command: Parser) -> None:
    add_model_options(command)
    names = ("method", "gamma", "policy", "temperature", "top_p", "max_tokens")
    _add_options(command, *names, max_tokens=48)
    command.add_argument("--kind", nargs="+", default=[], help="classes of prompts (default: all)")
    command.add_argument("--prompts", type=positive, default=20, help="number of prompts, of alternating classes")


def _serve(command: Parser) -> None:
    add_model_options(command)
    _add_options(command, "method", "gamma", "max_tokens", max_tokens=1024)
    add = command.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=int, default=8300, help="0 selects a free port")
    add("--certificate", type=Path, metavar="FILE", help="PEM file; enables TLS")
    add("--key", type=Path, metavar="FILE", help="private key of the certificate")
    add("--budget-mb", type=positive, default=2048, help="size of all KV caches between steps, MB")
    add("--contexts", type=positive, default=256, help="number of texts cached between steps")
    add("--expiry-s", type=float, default=600, help="lifetime of an unused text, seconds")
    add("--batch", type=positive, default=MOST_TEXTS, help="texts whose passes are shared; 1: no pass is shared")
    add("--queue", type=positive, default=64, help="queued requests; further requests are refused")
    add("--rate", type=float, default=0, help="requests per second and address; 0: unlimited")
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help="site whose pages may use the service")
    add("--body-mb", type=float, default=4, help="largest request, MB")
    add("--connections", type=positive, default=512, help="open connections; further connections are refused")
    add("--client-connections", type=positive, default=64, help="open connections per address; none for this machine")
    drained = "seconds that requests under way may take after a signal (default: 0, with --ray 60)"
    add("--drain-s", type=float, metavar="S", help=drained)
    add("--ray", action="store_true", help="serve with Ray Serve (package ray[serve]): replicas, autoscaling, metrics")
    add("--min-replicas", type=positive, default=1, metavar="N", help="replicas without load, with --ray")
    add("--max-replicas", type=positive, default=1, metavar="N", help="most replicas, with --ray")
    add("--until-stdin-ends", action="store_true", help="stop when standard input closes")


def _explain(command: Parser) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="log lines or JSON of llama.cpp, vLLM or SGLang")
    command.add_argument("--ar", type=float, metavar="T", help="tokens per second without drafts, for comparison")


def _convert_head(command: Parser) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="pickled tensors, such as pytorch_model.bin")
    command.add_argument("directory", type=Path, metavar="DIRECTORY", help="directory for model.safetensors")


ARGUMENTS = {  # command -> title, function that adds its arguments
    "run": ("continue a prompt and show accepted, rejected and corrected tokens", _run),
    "chat": ("converse in the terminal, with commands to change method, gamma and pair", _chat),
    "bench": ("measure recipes against autoregressive decoding, paired and alternating", _bench),
    "prove": ("compare the text with autoregressive decoding, token by token", _prove),
    "check-bundle": ("check a proof bundle, and repeat its runs", _check_bundle),
    "preflight": ("estimate the speed-up of a pair before a run", _preflight),
    "fit": ("list the models of this machine that can draft for a target, with their expected speed", _fit),
    "calibrate": ("measure thresholds of gates for a pair, and print their flags", _calibrate),
    "serve": ("OpenAI-compatible endpoint, and verification of drafts of other machines", _serve),
    "explain": ("explain statistics of llama.cpp, vLLM and SGLang", _explain),
    "convert-head": ("convert a pickled head to safetensors, without running its code", _convert_head),
}


def given(options: argparse.Namespace) -> dict[str, Any]:
    values, link = _values(options, Recipe.OPTIONS), _values(options, CloudConfig.OPTIONS)
    if "remote" in link:
        values["cloud"] = CloudConfig(**link)
    elif link:
        raise UserError(f"{', '.join(link)} has no effect without --remote: give the address of the service")
    return values


def with_pair_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the default pair, the chat pair if it is installed, with its settings."""
    pair = values.get("pair", first_installed(tuple(PAIRS)))
    if pair == CHAT_PAIR and "target" not in values and values.get("drafter", SAME) == SAME:
        return {"pair": pair, **settings_of_pair(PAIRS[pair], values)}
    return dict(values)


def checked_recipe(values: Mapping[str, Any], named: Iterable[str]) -> Recipe:
    """Return the recipe; announce a default pair. Raises `UserError` for `named` options without effect."""
    recipe = replace(Recipe(), **values)
    refuse_ineffective(recipe, named)
    announce_pair(named, values.get("pair", "bundled"))
    return recipe


def announce_pair(named: Iterable[str], pair: str = "bundled") -> None:
    """Print the default pair on a terminal, and elsewhere if it is a fallback, unless models are `named`."""
    if {"pair", "target"}.intersection(named):
        return
    missing = f"; {CHAT_PAIR} is not installed: {PAIRS[CHAT_PAIR].missing}" if PAIRS[CHAT_PAIR].missing else ""
    if missing or sys.stderr.isatty():
        print(f"specdemo: pair {pair}, {PAIRS[pair].title} (default{missing})", file=sys.stderr)


def _values(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(options, name, None) for name in names}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if value is not None
    }
