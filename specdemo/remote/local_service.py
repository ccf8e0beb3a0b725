"""A cloud of its own on this machine, for recipes that name no service: a real one, in a process beside this one.

Started when it is asked for, shared by all who want the same target, ended when nobody has used it for a while or this
process ends, however it ends. Knows recipes, processes and addresses; knows no models and no page.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from specdemo.core.errors import UserError
from specdemo.models.spec import ModelSpec
from specdemo.worker import interruptible

ROOT = Path(__file__).parents[2]
SAID = "listening on "
PATIENCE_S = 5.0  # for a process to end by itself
LONGEST_LINE = 300  # characters of what a process that failed had to say


def cores_but_one() -> int:
    """Threads for one of two programs on this machine: torch's wait for one another several hundred times a token.

    One that has to share its core stops them all.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


def command(spec: ModelSpec) -> list[str]:
    """The service for this target, on a free port of this machine only; it ends when its standard input does."""
    options = {"target": spec.name, "dtype": spec.dtype, "quantization": spec.quantization, "device": spec.device}
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "specdemo", "serve", "--port", "0", "--until-stdin-ends", *flags]


@dataclass
class ServiceProcess:
    """One service; `url` once it answers."""

    process: subprocess.Popen[str]
    errors: IO[str]
    url: str | None = None
    users: int = 0
    saying: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, arguments: Sequence[str]) -> ServiceProcess:
        """A new one, which may take a while to answer; it leaves the edge a core, unless the environment says more."""
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        environment = {"OMP_NUM_THREADS": str(cores_but_one()), **os.environ, "PYTHONPATH": path}
        return cls(subprocess.Popen(arguments, env=environment, **pipes), errors)

    def address(self) -> str:
        """Where it listens, as soon as it does. Raises `UserError` with its own words where it never will."""
        with self.saying:
            if self.url is None:
                line = self.process.stdout.readline()
                if not line.startswith(SAID):
                    self.end()
                    raise UserError(f"the cloud of its own did not start: {self._last_words()}")
                self.url = line.removeprefix(SAID).strip()
            return self.url

    def end(self) -> None:
        """Ask it to end, and see that it does."""
        with suppress(OSError):
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return lines[-1].removeprefix("specdemo: ")[:LONGEST_LINE] if lines else "it gave no reason"


class LocalServices:
    """All of them, by target. `close` ends them; so does the end of this process."""

    def __init__(self, idle_s: float = 600.0, start: Callable[[ModelSpec], ServiceProcess] | None = None) -> None:
        self._idle_s = idle_s
        self._start = start or (lambda spec: ServiceProcess.start(command(spec)))
        self._running: dict[ModelSpec, ServiceProcess] = {}
        self._door = threading.Lock()
        self._timer: threading.Timer | None = None

    @contextmanager
    def running(self, specs: Iterable[ModelSpec]) -> Iterator[dict[ModelSpec, str]]:
        """Yield the URL of a service for each of `specs`; services keep running for a while after the block."""
        used: dict[ModelSpec, ServiceProcess] = {}
        try:
            for spec in dict.fromkeys(specs):
                used[spec] = self._enter(spec)
            yield {spec: interruptible(process.address) for spec, process in used.items()}
        finally:
            self._leave(used)

    def close(self) -> None:
        """End all of them."""
        with self._door:
            self._end(list(self._running))

    def _enter(self, spec: ModelSpec) -> ServiceProcess:
        with self._door:
            if self._timer is not None:
                self._timer.cancel()
            # what nobody uses now makes room: each holds a target
            self._end([one for one, it in self._running.items() if not it.alive or (one != spec and not it.users)])
            if spec not in self._running:
                self._running[spec] = self._start(spec)
            self._running[spec].users += 1
            return self._running[spec]

    def _leave(self, used: dict[ModelSpec, ServiceProcess]) -> None:
        if not used:
            return
        with self._door:
            for process in used.values():
                process.users -= 1
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(self._idle_s, self._rest)
            self._timer.daemon = True
            self._timer.start()

    def _rest(self) -> None:
        with self._door:
            self._end([spec for spec, process in self._running.items() if not process.users])

    def _end(self, specs: Sequence[ModelSpec]) -> None:
        for spec in specs:
            self._running.pop(spec).end()
