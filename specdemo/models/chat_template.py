"""Rendering of untrusted chat templates in a separate process with limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specdemo.models.limited_process import LimitedProcess, serve
from specdemo.worker import interruptible

_CPU_SECONDS, _WALL_SECONDS = 5, 60
_MAX_BYTES, _MAX_CHARACTERS = 1 << 30, 2_000_000
_REMEDY = "disable the chat option, or choose another model"
_PROCESS = LimitedProcess(__name__)


def render_chat(template: str, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, Any]) -> str:
    values = {**tokens, "messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
    return interruptible(lambda: _PROCESS.request([template, values], _WALL_SECONDS, "the chat template", _REMEDY))


def _text(template: str, values: Mapping[str, Any]) -> str:
    """Render like `apply_chat_template`, which takes a second to import."""
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Template tag that marks texts of the assistant."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    text = environment.from_string(template).render(**values)
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"it produces {len(text):,} characters")
    return text


if __name__ == "__main__":
    _text("", {})  # import before the forks
    serve(lambda request: _text(*request), _CPU_SECONDS, _MAX_BYTES)
