"""Cloud services in local processes, for recipes without a service address."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specdemo.core.errors import UserError, write_error
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


class ServiceProcess:
    """Service process and its users."""

    def __init__(self, arguments: Sequence[str], count: int = 1) -> None:
        """Start one of `count` processes, which share `cores_but_one` threads by default."""
        try:
            self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        except OSError as error:
            raise write_error("a temporary file", error) from error
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"OMP_NUM_THREADS": str(max(1, cores_but_one() // count)), **os.environ, "PYTHONPATH": path}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            arguments, env=environment, stdin=pipe, stdout=pipe, stderr=self._errors, text=True
        )
        self.url: str | None = None
        self.users = 0
        self._url_lock = threading.Lock()

    def address(self) -> str:
        """Block until the service listens; raise `UserError` if it fails."""
        with self._url_lock:
            if self.url is None:
                assert self.process.stdout is not None
                line = self.process.stdout.readline()
                if not line.startswith(_READY_PREFIX):
                    self.end()
                    self._errors.seek(0)
                    printed = [text.strip() for text in self._errors if text.strip()] or ["it printed no error"]
                    cause = printed[-1].removeprefix("specdemo: ")[:_MAX_ERROR_CHARACTERS]
                    raise UserError(f"the local service did not start: {cause}")
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


class LocalServices:
    """Services by target and number. Idle services stop after `idle_s` seconds or when another target starts."""

    def __init__(self, idle_s: float = 600.0, start: Callable[[ModelSpec, int], ServiceProcess] | None = None) -> None:
        """`start(spec, count)` starts one of `count` processes."""
        self._idle_s = idle_s
        self._start = start or (lambda spec, count: ServiceProcess(serve_command(spec), count))
        self._running: dict[tuple[ModelSpec, int], ServiceProcess] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    @contextmanager
    def running(self, counts: Mapping[ModelSpec, int]) -> Iterator[dict[ModelSpec, str]]:
        """Yield the addresses of the processes of each target, separated by spaces."""
        used: dict[ModelSpec, list[ServiceProcess]] = {spec: [] for spec in counts}
        try:
            for spec, count in counts.items():
                with device_released():
                    used[spec] = self._acquire(spec, count)
            yield {
                spec: " ".join(interruptible(process.address) for process in processes)
                for spec, processes in used.items()
            }
        finally:
            if counts:
                with device_released():
                    self._release([process for processes in used.values() for process in processes])

    def kill(self, replica: str) -> None:
        """Kill the process with the name `host:port`. Raises `UserError`."""
        port = replica.rpartition(":")[2]
        with self._lock:
            named = [process for process in self._running.values() if (process.url or "").endswith(f":{port}")]
            if not replica or not named:
                raise UserError(
                    "no local service has verified a step of this run: wait for its first step, or choose a mode "
                    "without a service address, and Run"
                )
            named[0].process.kill()
            named[0].process.wait()

    def close(self) -> None:
        with self._lock:
            self._stop(list(self._running))

    def _acquire(self, spec: ModelSpec, count: int) -> list[ServiceProcess]:
        keys = [(spec, number) for number in range(count)]
        with self._lock:
            # Free memory for the new processes.
            self._stop([key for key, it in self._running.items() if not it.alive or (key not in keys and not it.users)])
            for key in keys:
                if key not in self._running:
                    self._running[key] = self._start(spec, count)
            processes = [self._running[key] for key in keys]
            for process in processes:
                process.users += 1
            return processes

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
            self._stop([key for key, process in self._running.items() if not process.users])

    def _stop(self, keys: Sequence[tuple[ModelSpec, int]]) -> None:
        for key in keys:
            self._running.pop(key).end()
