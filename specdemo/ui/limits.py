"""Limits of a host for its visitors, read from environment variables `SPECDEMO_*`.

The service applies them to page and API. The defaults are wide, since they are for private use.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from specdemo.core.errors import UserError, check_name
from specdemo.core.events import End, Event, Loading, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.core.trace import MAX_CHARACTERS
from specdemo.drafters import METHODS
from specdemo.external.address import KEY, EngineAddress
from specdemo.models.hub import Hub
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.native.build import SWITCH, VECTORS
from specdemo.option_rules import methods_with
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.access import TOKEN, is_origin, is_service_address
from specdemo.remote.admission import ConnectionLimits, RateLimiter, network_of
from specdemo.remote.config import CloudConfig
from specdemo.worker import MOST_TEXTS, Stream

T = TypeVar("T")

PREFIX = "SPECDEMO_"
_LISTS = {"remote": "any", "engines": "any", "hosts": "any", "pairs": None, "frames": None}  # values without a limit
MODEL_RULES = ("any", "hub", "listed")  # local files too; Hugging Face ids too; offered pairs
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
HUB_ID = re.compile(rf"{_PART}(/{_PART}(/({_PART}/)*{_PART}\.(?i:gguf))?)?")


@dataclass(frozen=True)
class HostLimits:
    """Limits per request and per visitor. `None` means unlimited."""

    public: bool = False  # visitors cannot unload models
    pairs: tuple[str, ...] = tuple(PAIRS)  # the page selects the first installed pair
    models: str = "any"
    max_tokens: int | None = None
    max_gamma: int | None = None
    max_nodes: int | None = None  # nodes of trees, beams and lookahead
    max_prompt: int | None = 100_000  # characters
    max_trace: int | None = MAX_CHARACTERS  # characters of an opened trace
    max_seconds: int | None = None  # decoding time of all lanes together, without queueing and loading
    queue: int | None = 32  # queued runs
    batch: int | None = MOST_TEXTS  # texts that share passes
    at_once: int | None = None  # queued and active runs per visitor
    per_minute: int | None = None  # started runs per visitor
    remote: tuple[str, ...] | None = None  # allowed services; `None`: any, and a local service started by the page
    engines: tuple[str, ...] | None = None  # allowed servers of other engines, as ENGINE=URL; `None`: any
    hosts: tuple[str, ...] | None = ()  # hosts of the page besides localhost, addresses and Spaces; `None`: any
    frames: tuple[str, ...] = ()  # origins of pages that may frame the page
    connections: int | None = ConnectionLimits.total
    visitor_connections: int | None = ConnectionLimits.per_visitor

    def __post_init__(self) -> None:
        check_name("rule for models", self.models, MODEL_RULES)
        for pair in self.pairs:
            check_name("pair", pair, PAIRS)
        for server in self.engines or ():
            EngineAddress.parse(server)
        for address in self.remote or ():
            if not is_service_address(address):
                raise UserError(f"{PREFIX}REMOTE must be addresses like http://host:port, or any, not {address!r}")
        for origin in self.frames:
            if not is_origin(origin):
                raise UserError(f"{PREFIX}FRAMES must be origins like https://school.example, not {origin!r}")

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
        if recipe.head is not None:
            self._check_model(recipe.head)
        for name, highest in self.bounds().items():
            value, methods = getattr(recipe, name), methods_with(Recipe.OPTIONS[name])
            if value is not None and value > highest and recipe.method in methods:
                raise UserError(f"{name} may be {highest:,} at most here, not {value:,}")
        self._check_service(recipe.cloud)
        self._check_server(recipe)
        lengths = plan_run(recipe).lengths
        if self.max_gamma is None or lengths.most <= self.max_gamma or not METHODS[recipe.method].uses_policy:
            return recipe
        return replace(recipe, gamma_min=min(lengths.least, self.max_gamma), gamma_max=self.max_gamma)

    @property
    def of_connections(self) -> ConnectionLimits:
        return ConnectionLimits(self.connections, self.visitor_connections)

    @property
    def hub(self) -> Hub:
        offered = (name for pair in self.pairs for name in (PAIRS[pair].target, PAIRS[pair].drafter))
        return Hub(trusted=frozenset(filter(None, offered)) if self.public else None)

    def check_settings(self, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Raise `UserError` if a visitor of a public page changes an option of the host."""
        for name, option in {**Recipe.OPTIONS, **CloudConfig.OPTIONS}.items():
            default = defaults.get(name, option.default)
            if self.public and option.host and settings.get(name, default) != default:
                raise UserError(f"{name} is set by the host of this page: leave it at its default")

    def clamp(self, recipe: Recipe) -> Recipe:
        """Return the nearest recipe within the limits: the default of the page."""
        bounds = self.bounds()
        reduced: dict[str, Any] = {name: most for name, most in bounds.items() if (getattr(recipe, name) or 0) > most}
        return replace(recipe, **reduced)

    def bounds(self) -> dict[str, int]:
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
        if not cloud.edge_only and not cloud.remote:
            raise UserError(f"no local cloud service is started here: {offered}")
        listed = {address.rstrip("/") for address in self.remote}
        if not cloud.edge_only and not listed.issuperset(cloud.addresses):
            raise UserError(f"only listed services are allowed here: {offered}")
        if cloud.emulated:
            raise UserError("link emulation is disabled here: set the emulated link values to 0")
        for name, seconds in (("deadline_ms", cloud.deadline_ms / 1000), ("lost_after_s", cloud.lost_after_s)):
            if self.max_seconds is not None and seconds > self.max_seconds:
                raise UserError(f"{name} may be {self.max_seconds} seconds at most here, not {seconds:g}")

    def _check_server(self, recipe: Recipe) -> None:
        server = plan_run(recipe).server
        if server is None or self.engines is None:
            return
        if server not in map(EngineAddress.parse, self.engines):
            offered = f"choose {' or '.join(self.engines)}" if self.engines else "leave external empty"
            raise UserError(f"only listed servers of other engines are allowed here: {offered}")


PUBLIC = HostLimits(
    public=True,
    pairs=(CHAT_PAIR, "bundled"),  # downloads of gigabytes are the decision of the host
    models="listed",
    max_tokens=1024,
    max_gamma=16,
    max_nodes=64,
    max_prompt=20_000,
    max_trace=4_000_000,
    max_seconds=120,
    at_once=2,
    per_minute=12,
    remote=(),
    engines=(),
)


def read_limits(environment: Mapping[str, str]) -> HostLimits:
    """Return the limits set by the environment.

    Defaults are `PUBLIC` if `SPECDEMO_PUBLIC` is 1 or the page is a Hugging Face Space. Numbers are integers from 1,
    or `none`. Raises `UserError` for unknown or invalid variables.
    """
    texts = {name.removeprefix(PREFIX).lower(): text for name, text in environment.items() if name.startswith(PREFIX)}
    texts = {
        name: text.strip()
        for name, text in texts.items()
        if text.strip() and PREFIX + name.upper() not in (TOKEN, KEY, SWITCH, VECTORS)
    }
    names = {field.name: f"{PREFIX}{field.name.upper()}" for field in fields(HostLimits)}
    for name in texts.keys() - names.keys():
        check_name("variable", f"{PREFIX}{name.upper()}", tuple(names.values()))
    public = texts.pop("public", "1" if "SPACE_ID" in environment else "0")
    if public not in ("0", "1"):
        raise UserError(f"{PREFIX}PUBLIC must be 0 or 1, not {public!r}")
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name == "models":
            values[name] = text
        elif text == _LISTS.get(name, "none"):
            values[name] = None
        elif name in _LISTS:
            values[name] = tuple(dict.fromkeys(text.replace(",", " ").split()))
        elif text.isdecimal() and 0 < int(text) < 1 << 31:
            values[name] = int(text)
        else:
            raise UserError(f"{names[name]} must be a whole number from 1, or none, not {text!r}")
    return replace(PUBLIC if public == "1" else HostLimits(), **values)


def address_of(connection: Any) -> str:
    """Return the client address of a request of Starlette or Gradio; with a proxy, `FORWARDED_ALLOW_IPS` selects it."""
    return connection.client.host if connection.client else ""


class TimeBudget:
    """Decoding time of a request in seconds, shared by its lanes. It starts with the first header."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._deadline = math.inf

    def spend(self, events: Generator[Event]) -> Iterator[Event]:
        """Pass the events on; when the time is over, close them and yield an `End`."""
        if self._seconds is None:
            yield from events
            return
        metrics = Metrics()
        for event in events:
            yield event
            if isinstance(event, End) or (isinstance(event, Loading) and self._deadline == math.inf):
                continue
            self._deadline = min(self._deadline, self._clock() + self._seconds)
            if isinstance(event, StepEvent):
                metrics = event.metrics
            if self._clock() >= self._deadline:
                events.close()
                yield End("cancelled", f"the time limit of {self._seconds} seconds per run is reached", metrics)


class RunRates:
    """Started and active runs by network. A visitor is an IPv4 address or an IPv6 /64 network."""

    def __init__(self, limits: HostLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_active = math.inf if limits.at_once is None else limits.at_once
        self._per_minute = limits.per_minute or 0
        self._starts = RateLimiter(self._per_minute / 60, self._per_minute, clock)
        self._active: WeakKeyDictionary[Stream[Any], str] = WeakKeyDictionary()  # streams retain all events
        self._lock = threading.RLock()

    def start(self, address: str, submit: Callable[[], Stream[T]], replaced: Stream[Any] | None = None) -> Stream[T]:
        """Submit a run. Raise `UserError` above a limit, without counting `replaced`."""
        network = network_of(address)
        with self._lock:
            runs = [run for run, other in self._active.items() if other == network and run is not replaced]
            active = sum(not run.done for run in runs)
            if active >= self._most_active:
                count = "1 run" if active == 1 else f"{active} runs"
                raise UserError(f"you already have {count} in progress: stop one, or wait until it ends")
            self.count(address)
            stream = submit()
            self._active[stream] = network
        return stream

    def count(self, address: str) -> None:
        """Count a request like a start. Raise `UserError` above the limit."""
        with self._lock:
            if not self._starts.allow(network_of(address)):
                wait = 60 / self._per_minute
                raise UserError(f"this host allows {self._per_minute} runs per minute: try again in {wait:.0f} s")
