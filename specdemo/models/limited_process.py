"""Processes with limits of time and memory, for inputs that may contain hostile programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdemo.core.errors import UserError, plain_text
from specdemo.worker import interruptible

_ROOT = Path(__file__).parents[2]


class LimitedProcess:
    """Process of `module`, started by the first request, and again after its end; see `serve`."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # the process answers a request at a time

    def request(self, request: Any, seconds: float, subject: str, remedy: str) -> Any:
        """Return the answer. Raises `UserError` about `subject`."""
        with self._lock:
            process, start = self._running(), time.monotonic()
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(seconds, _end, [process])
            timer.start()
            reply = ""
            try:
                process.stdin.write(json.dumps(request, default=str) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except OSError:
                pass  # the process ended
            finally:
                timer.cancel()
                timer.join()  # the next request must not use a process that is being ended
        if not reply and time.monotonic() - start >= seconds:
            raise UserError(f"{subject} takes more than {seconds:g} s: {remedy}")
        answer: dict[str, Any] = _parsed(reply) if reply else {"code": process.wait()}
        if "code" in answer:
            raise UserError(f"{subject} took too much time or memory (code {answer['code']}): {remedy}")
        if "error" in answer:
            raise UserError(f"{subject} failed ({plain_text(answer['error'], 200)}): {remedy}")
        return answer["value"]

    def try_file(self, path: Path, request: tuple[str, ...], seconds: float, subject: str) -> None:
        """Raise `UserError` about a request that fails; it is repeated only after a change of the file."""
        if problem := _problem(self, request, path.stat().st_mtime_ns, seconds, subject):
            raise UserError(problem)

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                _end(self._process)
                self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                errors="replace",
                cwd=_ROOT,
                start_new_session=True,  # it ends with its forks
            )
        return self._process


def _parsed(reply: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(reply)
    except ValueError:  # a limit ended the fork while it wrote
        return {"error": "its answer is incomplete"}
    return answer


@lru_cache(maxsize=16)  # prompts are encoded several times
def _problem(process: LimitedProcess, request: tuple[str, ...], changed: int, seconds: float, subject: str) -> str:
    """Return the error of a request, or an empty text; other jobs use the device meanwhile."""
    try:
        interruptible(lambda: process.request(request, seconds, subject, "choose another model"))
    except UserError as error:
        return str(error)
    return ""


def _end(process: subprocess.Popen[str]) -> None:
    if sys.platform != "win32" and process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def serve(respond: Callable[[Any], Any], cpu_seconds: int, max_bytes: int) -> None:
    """Answer the requests of standard input, each in a fork with limits; without forks, a single request."""
    for line in sys.stdin:
        if sys.platform == "win32":
            _send(_answer(respond, line))
            return
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _answer_in_fork(respond, line, writer, cpu_seconds, max_bytes)
        os.close(writer)
        with open(reader, encoding="utf-8", errors="replace") as file:
            text = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _send(text or json.dumps({"code": code}))


def _send(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _answer_in_fork(respond: Callable[[Any], Any], line: str, writer: int, cpu_seconds: int, max_bytes: int) -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):  # those of the server
            os.dup2(null, standard)
        _limit(cpu_seconds, max_bytes)
        with open(writer, "w", encoding="utf-8") as file:
            file.write(_answer(respond, line))
    finally:
        os._exit(1)


def _limit(cpu_seconds: int, max_bytes: int) -> None:
    if sys.platform != "win32":
        import resource

        limits = {resource.RLIMIT_CPU: cpu_seconds, resource.RLIMIT_CORE: 0}
        if sys.platform == "linux":
            limits[resource.RLIMIT_AS] = max_bytes
        for kind, limit in limits.items():
            most = resource.getrlimit(kind)[1]  # only root may exceed it
            lowest = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(kind, (lowest, lowest))


def _answer(respond: Callable[[Any], Any], line: str) -> str:
    try:
        return json.dumps({"value": respond(json.loads(line))})
    except MemoryError:
        return json.dumps({"error": "it needs too much memory"})
    except RecursionError:
        return json.dumps({"error": "it calls itself too often"})
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
