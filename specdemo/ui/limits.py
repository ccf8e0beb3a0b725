"""What a host lets its visitors ask for, read from `SPECDEMO_*` in the environment.

Knows recipes and prompts; knows nothing of models, threads or pages. The service holds everybody to it, the page's
visitors and the API's clients alike. Whoever runs the program alone is held to next to nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from specdemo.core.errors import UserError
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe, check_name
from specdemo.remote.config import CloudConfig
from specdemo.remote.remote_model import TOKEN

PREFIX = "SPECDEMO_"
MODEL_RULES = {
    "any": "Hugging Face ids and local directories too",
    "hub": "Hugging Face ids too, no directories",
    "listed": "the pairs that are offered and nothing else",
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


@dataclass(frozen=True)
class HostLimits:
    """The most that one request may be, and the most that one visitor may start. None: no limit."""

    public: bool = False  # whether visitors share the models: nobody may unload what others use
    pairs: tuple[str, ...] = tuple(PAIRS)  # the first of them is what the page begins with
    models: str = "any"
    max_tokens: int | None = None
    max_gamma: int | None = None
    max_nodes: int | None = None  # of a tree; beams of a search; places and guesses of lookahead
    max_prompt: int | None = 100_000  # characters: reading more than any context holds would only take time
    max_seconds: int | None = None  # of decoding, both lanes together; waiting and loading are not counted
    queue: int | None = 32  # runs that may wait
    at_once: int | None = None  # runs of one visitor that may wait or decode
    per_minute: int | None = None  # runs that one visitor may start
    remote: tuple[str, ...] | None = None  # services that may be asked; None: any, and one of its own on this machine

    def __post_init__(self) -> None:
        check_name("rule for models", self.models, MODEL_RULES)
        for pair in self.pairs:
            check_name("pair", pair, PAIRS)
        for address in self.remote or ():
            if not address.startswith(("http://", "https://")):
                raise UserError(f"{PREFIX}REMOTE must be addresses like http://host:port, or any, not {address!r}")

    def grant(self, recipe: Recipe, prompt: str) -> Recipe:
        """The recipe to run for this request; `UserError` where it asks for more than is given here.

        What was asked for is refused, not trimmed; only bounds that a policy brings along are drawn in.
        """
        if self.max_prompt is not None and len(prompt) > self.max_prompt:
            raise UserError(f"the prompt has {len(prompt):,} characters: shorten it to {self.max_prompt:,} at most")
        if recipe.target is None:
            check_name("pair", recipe.pair or "bundled", self.pairs)
        else:
            for name in filter(None, recipe.models):
                self._verifier(name)
        for name, (most, method) in self._numbers.items():
            value = getattr(recipe, name)
            if most is not None and value is not None and value > most and method in ("", recipe.method):
                raise UserError(f"{name} may be {most:,} at most here, not {value:,}")
        self._ask(recipe.cloud)
        return self._drawn_in(recipe)

    def fit(self, recipe: Recipe) -> Recipe:
        """The nearest recipe that is granted: what a page may begin with."""
        high = {
            name: most
            for name, (most, _) in self._numbers.items()
            if most is not None and (getattr(recipe, name) or 0) > most
        }
        return replace(recipe, **high)

    @property
    def _numbers(self) -> dict[str, tuple[int | None, str]]:
        """What is limited by a number, and the one method that looks at it, if there is but one."""
        return {
            "max_tokens": (self.max_tokens, ""),
            "gamma": (self.max_gamma, ""),
            "gamma_min": (self.max_gamma, ""),
            "gamma_max": (self.max_gamma, ""),
            "tree_nodes": (self.max_nodes, "tree"),
            "num_beams": (self.max_nodes, "beam"),
            "lookahead_window": (self.max_nodes, "lookahead"),
            "lookahead_guesses": (self.max_nodes, "lookahead"),
        }

    def _verifier(self, name: str) -> None:
        if self.models == "any":
            return
        offered = f"choose one of the pairs {', '.join(self.pairs)}"
        if self.models == "listed":
            raise UserError(f"no models but the listed ones run here: {offered}")
        if not HUB_ID.fullmatch(name) or os.path.exists(name):
            raise UserError(f"only names of the Hugging Face hub are taken here, and this is none: {offered}")

    def _ask(self, cloud: CloudConfig | None) -> None:
        """Whether this service may be asked from here: an address that anyone may name reaches what is behind us."""
        if cloud is None or self.remote is None:
            return
        offered = f"choose {' or '.join(self.remote)}" if self.remote else "decode here, with mode off"
        if not cloud.alone and not cloud.remote:
            raise UserError(f"no cloud of its own is started here: {offered}")
        if not cloud.alone and cloud.remote.rstrip("/") not in [address.rstrip("/") for address in self.remote]:
            raise UserError(f"no services but the named ones are asked from here: {offered}")
        if cloud.emulated:
            raise UserError("no link is emulated here: everybody would wait for it")
        for name, seconds in (("deadline_ms", cloud.deadline_ms / 1000), ("lost_after_s", cloud.lost_after_s)):
            if self.max_seconds is not None and seconds > self.max_seconds:
                raise UserError(f"{name} may be {self.max_seconds} seconds at most here, not {seconds:g}")

    def _drawn_in(self, recipe: Recipe) -> Recipe:
        least, most = recipe.gamma_bounds
        if self.max_gamma is None or most <= self.max_gamma:
            return recipe
        return replace(recipe, gamma_min=min(least, self.max_gamma), gamma_max=self.max_gamma)


PUBLIC = HostLimits(
    public=True,
    pairs=("bundled",),  # what comes from the hub is gigabytes: a host says which
    models="listed",
    max_tokens=1024,
    max_gamma=16,
    max_nodes=64,
    max_prompt=20_000,
    max_seconds=120,
    at_once=2,
    per_minute=12,
    remote=(),
)


def read_limits(environment: Mapping[str, str]) -> HostLimits:
    """The limits that the environment sets.

    They begin with those of a public page where `SPECDEMO_PUBLIC` is 1 or the page is a Hugging Face Space. Numbers are
    whole and at least 1, or `none`; `UserError` names a variable that is not known or makes no sense.
    """
    given = {name.removeprefix(PREFIX).lower(): text for name, text in environment.items() if name.startswith(PREFIX)}
    given = {name: text.strip() for name, text in given.items() if text.strip() and PREFIX + name.upper() != TOKEN}
    names = {field.name: f"{PREFIX}{field.name.upper()}" for field in fields(HostLimits)}
    for name in given.keys() - names.keys():
        check_name("variable", f"{PREFIX}{name.upper()}", tuple(names.values()))
    public = given.pop("public", "1" if "SPACE_ID" in environment else "0")
    if public not in ("0", "1"):
        raise UserError(f"{PREFIX}PUBLIC must be 0 or 1, not {public!r}")
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name == "pairs":
            values[name] = tuple(dict.fromkeys(text.replace(",", " ").split()))
        elif name == "models":
            values[name] = text
        elif name == "remote":
            values[name] = None if text == "any" else tuple(text.replace(",", " ").split())
        elif text == "none":
            values[name] = None
        elif text.isdecimal() and 0 < int(text) < 1 << 31:
            values[name] = int(text)
        else:
            raise UserError(f"{names[name]} must be a whole number from 1, or none, not {text!r}")
    return replace(PUBLIC if public == "1" else HostLimits(), **values)
