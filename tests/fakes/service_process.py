"""The service of the bundled pair in a process of its own, which faults stop, continue or kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]


@dataclass
class ServiceProcess:
    """A service at a fixed address, which can be started again."""

    options: tuple[str, ...]
    environment: Mapping[str, str]
    port: int = 0
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "specdemo", "serve", "--pair", "bundled", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *self.options],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), line
        self.port = urlsplit(line.removeprefix("listening on ").strip()).port or 0

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def service_process(*options: str, **environment: str) -> Iterator[ServiceProcess]:
    service = ServiceProcess(options, environment)
    service.start()
    try:
        yield service
    finally:
        service.kill()
