"""Rendering of untrusted chat templates in a separate process with limits.

Random choices are seeded, and the clock is the option `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from specdemo.core.errors import UserError
from specdemo.models.limited_process import LimitedProcess, serve
from specdemo.worker import interruptible

CLOCK = "strftime_now"  # function of templates, and option with its time
CONTINUE = "continue_final_message"
_MOST_OPTIONS, _MOST_OPTION_CHARACTERS = 64, 10_000
_CPU_SECONDS, _WALL_SECONDS = 5, 60
_MAX_BYTES, _MAX_CHARACTERS = 1 << 30, 2_000_000
_REMEDY = "disable the chat option, or choose another model"
_PROCESS = LimitedProcess(__name__)

Messages = Sequence[Mapping[str, Any]]


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return the template variables of NAME=VALUE; values are JSON or text. Raises `UserError`."""
    if len(texts) > _MOST_OPTIONS or any(len(text) > _MOST_OPTION_CHARACTERS for text in texts):
        raise UserError(
            f"template_options has more than {_MOST_OPTIONS} values or {_MOST_OPTION_CHARACTERS:,} characters in a "
            "value: shorten the list"
        )
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name == "messages":
            raise UserError(f"template_options must be NAME=VALUE, such as enable_thinking=false, not {text[:80]!r}")
        try:
            values[name] = json.loads(value)
        except (ValueError, RecursionError):
            values[name] = value
    try:
        datetime.fromisoformat(str(values.get(CLOCK, "2000-01-01")))
    except ValueError:
        raise UserError(f"template_options: {CLOCK} must be a time such as 2026-03-01T12:00:00") from None
    return values


def format_options(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options NAME=VALUE of template variables."""
    return tuple(f"{name}={json.dumps(value)}" for name, value in values.items())


def at_time(texts: Sequence[str], now: datetime) -> tuple[str, ...]:
    timed = any(text.startswith(f"{CLOCK}=") for text in texts)
    return (*texts, *(() if timed else (f"{CLOCK}={now.isoformat(timespec='seconds')}",)))


def render_chat(
    template: str, conversations: Sequence[Messages], tokens: Mapping[str, Any], options: Mapping[str, Any]
) -> list[str]:
    """Render each of `conversations`. Raises `UserError`."""
    values = {**tokens, "add_generation_prompt": not options.get(CONTINUE), **options}
    request = [template, values, conversations]
    rendered: list[str] = interruptible(lambda: _PROCESS.request(request, _WALL_SECONDS, "the chat template", _REMEDY))
    return rendered


def _environment(moment: datetime) -> Any:
    """Return an environment like that of `apply_chat_template`, where undefined variables also equal none."""
    from jinja2 import ChainableUndefined, TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Template tag that marks texts of the assistant."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Environment that refuses unsafe attributes, even unused."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
            raise SecurityError(f"access to {attribute!r} is unsafe")

    class Absent(ChainableUndefined):
        """Undefined variable, equal to null."""

        def __eq__(self, other: object) -> bool:
            return other is None or isinstance(other, Absent)

        def __ne__(self, other: object) -> bool:
            return not self == other

        __hash__ = ChainableUndefined.__hash__

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        plain = None if isinstance(value, Absent) else value
        return json.dumps(plain, ensure_ascii=ensure_ascii, **options)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], undefined=Absent)
    environment.filters["tojson"] = to_json
    environment.tests["none"] = lambda value: value is None or isinstance(value, Absent)
    environment.globals["raise_exception"] = refuse
    environment.globals[CLOCK] = moment.strftime
    return environment


def _texts(template: str, values: Mapping[str, Any], conversations: Sequence[Messages]) -> list[str]:
    """Render like `apply_chat_template`, which takes a second to import."""
    import random

    program = _environment(datetime.fromisoformat(str(values[CLOCK]))).from_string(template)
    given = {name: value for name, value in values.items() if name != CLOCK}
    texts = []
    for messages in conversations:
        random.seed(0)
        texts.append(program.render({**given, "messages": messages}))
        if len(texts[-1]) > _MAX_CHARACTERS:
            raise ValueError(f"it produces {len(texts[-1]):,} characters")
    return texts


if __name__ == "__main__":
    _texts("", {CLOCK: "2000-01-01"}, [[]])  # import before the forks
    serve(lambda request: _texts(*request), _CPU_SECONDS, _MAX_BYTES)
