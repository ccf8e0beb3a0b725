"""Rendering of untrusted chat templates in a separate process with limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from specdemo.core.errors import UserError, plain_text
from specdemo.worker import interruptible

_ROOT = Path(__file__).parents[2]
_CPU_SECONDS, _SECONDS = 5, 20
_MAX_BYTES, _MAX_CHARACTERS = 1 << 30, 2_000_000
_REMEDY = "disable the chat option, or choose another model"


def render_chat(template: str, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, Any]) -> str:
    values = {**tokens, "messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
    return interruptible(lambda: _render(json.dumps([template, values], default=str)))


@lru_cache(maxsize=4)
def _render(request: str) -> str:
    try:
        result = subprocess.run(
            [sys.executable, "-m", __name__],
            input=request,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
            cwd=_ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"the chat template takes more than {_SECONDS} s: {_REMEDY}") from None
    if not result.stdout:
        raise UserError(f"the chat template took too much time or memory (code {result.returncode}): {_REMEDY}")
    answer = json.loads(result.stdout)
    if "error" in answer:
        raise UserError(f"the chat template failed ({plain_text(answer['error'], 200)}): {_REMEDY}")
    return answer["text"]


def _limit() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))


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


def main() -> None:
    _limit()
    try:
        answer = {"text": _text(*json.load(sys.stdin))}
    except MemoryError:
        answer = {"error": "it needs too much memory"}
    except RecursionError:
        answer = {"error": "it calls itself too often"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
