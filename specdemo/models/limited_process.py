"""Processes with limits of time and memory, for inputs that may contain hostile programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdemo.core.errors import UserError, plain_text

_ROOT = Path(__file__).parents[2]


def request_answer(module: str, request: Any, seconds: float, subject: str, remedy: str) -> Any:
    """Return the answer of a process that runs `module`. Raises `UserError` about `subject`."""
    try:
        result = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(request, default=str),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            cwd=_ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{subject} takes more than {seconds:g} s: {remedy}") from None
    if not result.stdout:
        raise UserError(f"{subject} took too much time or memory (code {result.returncode}): {remedy}")
    answer = json.loads(result.stdout)
    if "error" in answer:
        raise UserError(f"{subject} failed ({plain_text(answer['error'], 200)}): {remedy}")
    return answer["value"]


def answer(respond: Callable[[Any], Any], cpu_seconds: int, max_bytes: int) -> None:
    """Limit this process and answer the request of standard input."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    try:
        result = {"value": respond(json.load(sys.stdin))}
    except MemoryError:
        result = {"error": "it needs too much memory"}
    except RecursionError:
        result = {"error": "it calls itself too often"}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    json.dump(result, sys.stdout)
