"""Processes forked from a process with loaded modules: importing torch and the page takes five seconds."""

import importlib
import multiprocessing
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE = 120.0
MODULES = [
    "specdemo.cli.run",
    "specdemo.cli.commands",
    "specdemo.models.chat_template",
    "specdemo.remote.target",
    "specdemo.models.engines.native_weights",
    "specdemo.ui.page",
]
ROOT = Path(__file__).parents[2]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(MODULES)


class ForkedProcess:
    """Process that calls `target` with pipes as standard output and error, and one thread for torch."""

    def __init__(
        self,
        target: Callable[..., object],
        *args: Any,
        output: Path | None = None,
        errors_in_output: bool = False,
        **environment: str,
    ) -> None:
        """`output`: a file instead of the pipe of standard output."""
        readers, writers = zip(*(context.Pipe(duplex=False) for _ in range(2)), strict=True)
        outputs = (writers[0], writers[0] if errors_in_output else writers[1], output)
        given = (target, args, {**os.environ, **environment}, *outputs)
        self._process = context.Process(target=_run, args=given, daemon=True)
        self._process.start()
        self.stdout, self.stderr = map(_opened, readers)
        for writer in writers:
            writer.close()

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def wait(self) -> int:
        """Return the exit code, or a negative signal, after the end of the process."""
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def communicate(self) -> tuple[str, str]:
        """Return output and errors after the end of the process."""
        with ThreadPoolExecutor(2) as executor:
            output, errors = executor.map(TextIOWrapper.read, (self.stdout, self.stderr))
        self.wait()
        return output, errors

    def close(self) -> None:
        self._process.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()


def terminal(*arguments: str) -> None:
    sys.argv = ["specdemo", *arguments]
    runpy.run_module("specdemo", run_name="__main__")


def page(*arguments: str) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        os.environ.pop(name, None)
    sys.argv = ["app.py", *arguments]
    runpy.run_path(str(ROOT / "app.py"), run_name="__main__")


def run_with_new_modules(source: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "specdemo"]:
        del sys.modules[name]
    exec(source, {"__name__": "__main__"})


def without_sigint(program: Callable[..., None], *arguments: Any) -> None:
    """Ignore SIGINT, like background jobs, and run a program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program(*arguments)


def with_hub(program: Callable[..., None], *arguments: str) -> None:
    """Read the environment variables of the hub, which were read when its modules were imported, and run a program."""
    from huggingface_hub import constants

    importlib.reload(constants)
    program(*arguments)


def terminal_with_full_disk(size: int, *arguments: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    terminal(*arguments)


def _opened(reader: Connection) -> Any:
    file = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
    reader.close()
    return file


def _run(
    target: Callable[..., object],
    args: tuple[Any, ...],
    environment: dict[str, str],
    stdout: Connection,
    stderr: Connection,
    output: Path | None,
) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdout.fileno() if output is None else os.open(output, os.O_WRONLY), 1)
    os.dup2(stderr.fileno(), 2)
    stdout.close()
    stderr.close()
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False, buffering=1) for number in (1, 2))
    torch.set_num_threads(1)
    target(*args)
