"""Cloud services in local processes, for recipes without a service address."""

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
from specdemo.worker import device_released, interruptible

_ROOT = Path(__file__).parents[2]
_READY_PREFIX = "listening on "
_EXIT_TIMEOUT_S = 5.0
_MAX_ERROR_CHARACTERS = 300


def cores_but_one() -> int:
    """Number of threads that leaves a core to another process.

    torch's threads synchronise hundreds of times per token: sharing a core delays all of them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


def serve_command(spec: ModelSpec) -> list[str]:
    """Command line of a service that ends with its standard input."""
    options = {"target": spec.name, "dtype": spec.dtype, "quantization": spec.quantization, "device": spec.device}
    options["activations"] = spec.activations
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "specdemo", "serve", "--port", "0", "--until-stdin-ends", *flags]


@dataclass
class ServiceProcess:
    """Service process and its users."""

    process: subprocess.Popen[str]
    errors: IO[str]
    url: str | None = None
    users: int = 0
    _url_lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, arguments: Sequence[str]) -> ServiceProcess:
        """Start the process with `cores_but_one` threads by default."""
        try:
            errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        except OSError as error:
            cause = error.strerror or type(error).__name__
            raise UserError(f"no temporary file can be written ({cause}): free some space, or set TMPDIR") from error
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        pipe = subprocess.PIPE
        environment = {"OMP_NUM_THREADS": str(cores_but_one()), **os.environ, "PYTHONPATH": path}
        return cls(
            subprocess.Popen(arguments, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True), errors
        )

    def address(self) -> str:
        """Block until the service listens; raise `UserError` if it fails."""
        with self._url_lock:
            if self.url is None:
                assert self.process.stdout is not None
                line = self.process.stdout.readline()
                if not line.startswith(_READY_PREFIX):
                    self.end()
                    raise UserError(f"the local service did not start: {self._last_error()}")
                self.url = line.removeprefix(_READY_PREFIX).strip()
            return self.url

    def end(self) -> None:
        """Terminate the process, if necessary by SIGKILL."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def _last_error(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return lines[-1].removeprefix("specdemo: ")[:_MAX_ERROR_CHARACTERS] if lines else "it printed no error"


class LocalServices:
    """Services by target. Idle services stop after `idle_s` seconds or when another target starts."""

    def __init__(self, idle_s: float = 600.0, start: Callable[[ModelSpec], ServiceProcess] | None = None) -> None:
        self._idle_s = idle_s
        self._start = start or (lambda spec: ServiceProcess.start(serve_command(spec)))
        self._running: dict[ModelSpec, ServiceProcess] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    @contextmanager
    def running(self, specs: Iterable[ModelSpec]) -> Iterator[dict[ModelSpec, str]]:
        used: dict[ModelSpec, ServiceProcess] = {}
        try:
            for spec in dict.fromkeys(specs):
                with device_released():
                    used[spec] = self._acquire(spec)
            yield {spec: interruptible(process.address) for spec, process in used.items()}
        finally:
            if used:
                with device_released():
                    self._release(used.values())

    def close(self) -> None:
        with self._lock:
            self._stop(list(self._running))

    def _acquire(self, spec: ModelSpec) -> ServiceProcess:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._stop(  # free memory for the new target
                [other for other, it in self._running.items() if not it.alive or (other != spec and not it.users)]
            )
            if spec not in self._running:
                self._running[spec] = self._start(spec)
            self._running[spec].users += 1
            return self._running[spec]

    def _release(self, processes: Iterable[ServiceProcess]) -> None:
        with self._lock:
            for process in processes:
                process.users -= 1
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(self._idle_s, self._stop_idle)
            self._timer.daemon = True
            self._timer.start()

    def _stop_idle(self) -> None:
        with self._lock:
            self._stop([spec for spec, process in self._running.items() if not process.users])

    def _stop(self, specs: Sequence[ModelSpec]) -> None:
        for spec in specs:
            self._running.pop(spec).end()
