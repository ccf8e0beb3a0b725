"""The `chat` command: a conversation, or texts for pairs without a chat template, in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import closing
from dataclasses import replace
from typing import Any

from specdemo.cli.run import StatusLine, coloured_text, has_colour, recipe_of_flags, show_loading
from specdemo.core.errors import UserError, check_name
from specdemo.core.events import End, Header, Loading, StepEvent
from specdemo.core.formats import number, percent
from specdemo.core.metrics import Metrics
from specdemo.drafters import METHODS
from specdemo.generate import generate
from specdemo.models.chat_caches import Stores
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import PAIRS
from specdemo.option_rules import refuse_ineffective
from specdemo.recipe import Recipe
from specdemo.signals import Terminated, handle_signals, interrupt

HELP = """\
/method NAME   decode with another method: {methods}
/gamma N       set the draft length
/pair NAME     load another pair: {pairs}
/compare       repeat the last answer without drafts and compare the speed
/quit          leave"""


def chat(options: argparse.Namespace) -> int:
    """Read messages and commands from standard input until /quit or its end; return the exit code."""
    recipe = recipe_of_flags(options)
    session = Session(recipe, has_colour(options.color))
    print(f"{_described(recipe)}. /help lists the commands.")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            return 130
        if line.partition(" ")[0] in ("/quit", "/exit"):
            return 0
        try:
            with handle_signals(interrupt, signal.SIGINT):  # once per answer
                session.enter(line)
        except Terminated:
            return 130
        except UserError as error:
            print(f"specdemo: {error}", file=sys.stderr)
        except KeyboardInterrupt:  # ends the answer, which is not part of the conversation
            print()


class Session:
    """State of the terminal: recipe, conversation, and KV caches of its turns."""

    def __init__(self, recipe: Recipe, coloured: bool) -> None:
        self.recipe, self._coloured = recipe, coloured
        self.messages: list[dict[str, str]] = []
        self._pool = ModelPool()
        self._stores = Stores()
        self._last: tuple[Recipe, Any, Metrics] | None = None  # recipe, prompt and figures of the last answer

    def enter(self, line: str) -> None:
        """Execute a command or answer a message. Raises `UserError`."""
        if not line.startswith("/"):
            return self._answer(line) if line else None
        name, _, value = line[1:].partition(" ")
        match name:
            case "method":
                self._change(method=value.strip())
            case "gamma":
                if not value.strip().isdecimal():
                    raise UserError(f"gamma must be a number like 4, not {value!r}")
                self._change(gamma=int(value))
            case "pair":
                self._set_pair(value.strip())
            case "compare":
                self._compare()
            case "help":
                print(HELP.format(methods=", ".join(METHODS), pairs=", ".join(PAIRS)))
            case _:
                check_name("command", name, ("method", "gamma", "pair", "compare", "help", "quit"))

    def _set_pair(self, name: str) -> None:
        check_name("pair", name, PAIRS)
        self._change(pair=name, target=None, drafter=None, head=None, **PAIRS[name].settings)
        self.messages, self._last = [], None
        self._stores = Stores()

    def _compare(self) -> None:
        """Decode the last answer again without drafts."""
        if self._last is None:
            raise UserError("there is no answer to compare: write a message first")
        recipe, prompt, drafted = self._last
        _, plain = self._show(replace(recipe, method="ar", use_cache=True), prompt, Stores())
        if drafted.tokens_per_second and plain.tokens_per_second:
            ratio = drafted.tokens_per_second / plain.tokens_per_second
            print(f"{recipe.method} decodes {ratio:.2f} times as fast as ar")

    def _answer(self, line: str) -> None:
        messages = [*self.messages, {"role": "user", "content": line}]
        prompt = messages if self.recipe.chat else line
        text, metrics = self._show(self.recipe, prompt, self._stores)
        self._last = self.recipe, prompt, metrics
        if self.recipe.chat:
            self.messages = [*messages, {"role": "assistant", "content": text}]

    def _show(self, recipe: Recipe, prompt: Any, stores: Stores) -> tuple[str, Metrics]:
        """Print an answer and its speed."""
        loading, metrics = StatusLine(), Metrics()
        texts: list[str] = []
        with closing(generate(recipe, prompt, self._pool, stores)) as events:
            for event in events:
                match event:
                    case Loading():
                        if not texts:
                            show_loading(loading, event)
                    case Header():
                        loading.clear()
                    case StepEvent():
                        texts.append(event.text)
                        metrics = event.metrics
                        print(coloured_text(event, self._coloured), end="", flush=True)
                    case End():
                        if event.error:
                            raise UserError(f"the answer failed: {event.error}")
        print(f"\n[{recipe.method}: {_speed(metrics)}]")
        return "".join(texts), metrics

    def _change(self, **values: Any) -> None:
        recipe = replace(self.recipe, **values)
        refuse_ineffective(recipe, () if "pair" in values else values)
        if "method" in values:
            self._stores = self._stores.without_conversation()
        self.recipe = recipe
        print(_described(recipe))


def _described(recipe: Recipe) -> str:
    target = recipe.target or PAIRS[recipe.pair or "bundled"].title
    gamma = f", gamma {recipe.gamma}" if METHODS[recipe.method].uses_policy else ""
    return f"{target}; method {recipe.method}{gamma}, temperature {recipe.temperature:g}"


def _speed(metrics: Metrics) -> str:
    accepted = f", accepted {percent(metrics.acceptance_rate, '-', '')} of drafts" if metrics.drafted else ""
    return (
        f"{metrics.tokens} tokens, {number(metrics.tokens_per_second, 1, '-')} tokens/s, "
        f"{number(metrics.tokens_per_target_pass, 2, '-')} tokens/pass{accepted}"
    )
