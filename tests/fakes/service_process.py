"""The service of the bundled pair in a process of its own, which faults stop, continue, kill and replace."""

import signal
from urllib.parse import urlsplit

from fakes.forked_process import ForkedProcess, terminal

COMMAND = ("serve", "--pair", "bundled", "--device", "cpu")


class ServiceProcess:
    """A service with a fixed address."""

    def __init__(self, *options: str, **environment: str) -> None:
        self._options, self._environment, self.port = options, environment, 0
        self.start()

    def start(self) -> None:
        """Start the process, again at the same port."""
        flags = ("--port", str(self.port), *self._options)
        self.process = ForkedProcess(terminal, *COMMAND, *flags, **self._environment)
        self.url = self.process.stdout.readline().removeprefix("listening on ").strip()
        self.port = urlsplit(self.url).port or 0

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        code = self.process.wait()
        self.process.close()
        return code

    def restart(self) -> None:
        self.end()
        self.start()

    def close(self) -> None:
        self.process.close()
