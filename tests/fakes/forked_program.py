"""`python -m specdemo` in a process that is forked from one with loaded modules: importing them takes three seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

PATIENCE = 60.0
MODULES = ["specdemo.cli.run", "specdemo.cli.commands", "specdemo.models.chat_template"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(MODULES)


class ForkedProgram:
    """Process of the terminal with pipes of its output; it is killed by `close`."""

    def __init__(
        self, *arguments: str, output: Path | None = None, prepare: Callable[[], None] | None = None, **environment: str
    ) -> None:
        """`output` is a file instead of the pipe; `prepare` is called first in the new process."""
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in pipes]
        given = (arguments, {**os.environ, **environment}, *writers, output, prepare)
        self._process = context.Process(target=_run, args=given, daemon=True)
        self._process.start()
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader, _ in pipes)
        for pipe in pipes:
            for end in pipe:
                end.close()

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> int:
        """Return the exit code, or a negative signal, after the end of the process."""
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def close(self) -> None:
        self._process.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()


def _run(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    stdout: Connection,
    stderr: Connection,
    output: Path | None,
    prepare: Callable[[], None] | None,
) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdout.fileno() if output is None else os.open(output, os.O_WRONLY), 1)
    os.dup2(stderr.fileno(), 2)
    stdout.close()
    stderr.close()
    sys.stdout, sys.stderr = (open(descriptor, "w", encoding="utf-8", closefd=False) for descriptor in (1, 2))
    if prepare is not None:
        prepare()
    torch.set_num_threads(1)
    sys.argv = ["specdemo", *arguments]
    runpy.run_module("specdemo", run_name="__main__")
