"""Limits of a host for its visitors, from environment variables `SPECDEMO_*`.

The service applies them to page and API. The defaults, for private use, are wide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from specdemo.core.errors import UserError, check_name
from specdemo.models.zoo import PAIRS
from specdemo.recipe import Recipe, methods_with
from specdemo.remote.client import TOKEN
from specdemo.remote.config import CloudConfig

PREFIX = "SPECDEMO_"
MODEL_RULES = {
    "any": "Hugging Face ids and local directories too",
    "hub": "Hugging Face ids too, no directories",
    "listed": "the offered pairs only",
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


@dataclass(frozen=True)
class HostLimits:
    """Limits per request and per visitor; `None` is unlimited."""

    public: bool = False  # visitors share the models, so they cannot unload them
    pairs: tuple[str, ...] = tuple(PAIRS)  # the first is the default of the page
    models: str = "any"
    max_tokens: int | None = None
    max_gamma: int | None = None
    max_nodes: int | None = None  # of trees, beams and lookahead
    max_prompt: int | None = 100_000  # characters
    max_seconds: int | None = None  # of decoding, all lanes together, without queueing and loading
    queue: int | None = 32  # queued runs
    at_once: int | None = None  # queued and active runs per visitor
    per_minute: int | None = None  # started runs per visitor
    remote: tuple[str, ...] | None = None  # allowed services; `None`: any, and a local service started by the page

    def __post_init__(self) -> None:
        check_name("rule for models", self.models, MODEL_RULES)
        for pair in self.pairs:
            check_name("pair", pair, PAIRS)
        for address in self.remote or ():
            if not address.startswith(("http://", "https://")):
                raise UserError(f"{PREFIX}REMOTE must be addresses like http://host:port, or any, not {address!r}")

    def grant(self, recipe: Recipe, prompt: str) -> Recipe:
        """Return the recipe to run. Raises `UserError` for values above the limits.

        Explicit values are refused, not reduced; only a policy's default bounds are reduced.
        """
        if self.max_prompt is not None and len(prompt) > self.max_prompt:
            raise UserError(f"the prompt has {len(prompt):,} characters: shorten it to {self.max_prompt:,} at most")
        if recipe.target is None:
            check_name("pair", recipe.pair or "bundled", self.pairs)
        else:
            for name in filter(None, recipe.models):
                self._check_model(name)
        for name, highest in self._bounds().items():
            value, methods = getattr(recipe, name), methods_with(Recipe.OPTIONS[name])
            if value is not None and value > highest and recipe.method in methods:
                raise UserError(f"{name} may be {highest:,} at most here, not {value:,}")
        self._check_service(recipe.cloud)
        return self._within_gamma(recipe)

    def check_settings(self, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Raise `UserError` if a visitor of a public page changes an option of the host."""
        for name, option in Recipe.OPTIONS.items():
            if self.public and option.host and settings.get(name, defaults[name]) != defaults[name]:
                raise UserError(f"{name} is set by the host of this page: leave it at its default")

    def fit(self, recipe: Recipe) -> Recipe:
        """Return the nearest recipe within the limits: the default of the page."""
        bounds = self._bounds()
        return replace(recipe, **{name: high for name, high in bounds.items() if (getattr(recipe, name) or 0) > high})

    def highest(self, name: str) -> int | None:
        return self._bounds().get(name)

    def _bounds(self) -> dict[str, int]:
        limits = {name: getattr(self, option.limit) for name, option in Recipe.OPTIONS.items() if option.limit}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def _check_model(self, name: str) -> None:
        if self.models == "any":
            return
        offered = f"choose one of the pairs {', '.join(self.pairs)}"
        if self.models == "listed":
            raise UserError(f"only listed models run here: {offered}")
        if not HUB_ID.fullmatch(name) or os.path.exists(name):
            raise UserError(f"only Hugging Face ids are valid here: {offered}")

    def _check_service(self, cloud: CloudConfig | None) -> None:
        """Raise `UserError` unless this service is allowed; free addresses would expose the host's network."""
        if cloud is None or self.remote is None:
            return
        offered = f"choose {' or '.join(self.remote)}" if self.remote else "decode here, with mode off"
        if not cloud.alone and not cloud.remote:
            raise UserError(f"no local cloud service is started here: {offered}")
        if not cloud.alone and cloud.remote.rstrip("/") not in [address.rstrip("/") for address in self.remote]:
            raise UserError(f"only listed services are allowed here: {offered}")
        if cloud.emulated:
            raise UserError("link emulation is disabled here: set the emulated link values to 0")
        for name, seconds in (("deadline_ms", cloud.deadline_ms / 1000), ("lost_after_s", cloud.lost_after_s)):
            if self.max_seconds is not None and seconds > self.max_seconds:
                raise UserError(f"{name} may be {self.max_seconds} seconds at most here, not {seconds:g}")

    def _within_gamma(self, recipe: Recipe) -> Recipe:
        least, most = recipe.gamma_bounds
        if self.max_gamma is None or most <= self.max_gamma:
            return recipe
        return replace(recipe, gamma_min=min(least, self.max_gamma), gamma_max=self.max_gamma)


PUBLIC = HostLimits(
    public=True,
    pairs=("bundled",),  # downloads of gigabytes are the decision of the host
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
    """Return the limits set by the environment.

    Defaults are `PUBLIC` if `SPECDEMO_PUBLIC` is 1 or the page is a Hugging Face Space. Numbers are integers from 1,
    or `none`. Raises `UserError` for unknown or invalid variables.
    """
    texts = {name.removeprefix(PREFIX).lower(): text for name, text in environment.items() if name.startswith(PREFIX)}
    texts = {name: text.strip() for name, text in texts.items() if text.strip() and PREFIX + name.upper() != TOKEN}
    names = {field.name: f"{PREFIX}{field.name.upper()}" for field in fields(HostLimits)}
    for name in texts.keys() - names.keys():
        check_name("variable", f"{PREFIX}{name.upper()}", tuple(names.values()))
    public = texts.pop("public", "1" if "SPACE_ID" in environment else "0")
    if public not in ("0", "1"):
        raise UserError(f"{PREFIX}PUBLIC must be 0 or 1, not {public!r}")
    values: dict[str, Any] = {}
    for name, text in texts.items():
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
