"""Jobs of a worker that start together, and waiting for their ends."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specdemo.worker import Stream, Worker

PATIENCE = 60.0  # seconds


@contextmanager
def submitting(worker: Worker) -> Iterator[None]:
    """Start the jobs of the block together."""
    inside, begin = threading.Event(), threading.Event()

    def blocker() -> Iterator[bool]:
        inside.set()
        yield begin.wait(PATIENCE)

    worker.submit(blocker)
    assert inside.wait(PATIENCE)
    yield
    begin.set()


def finished(stream: Stream[Any]) -> Stream[Any]:
    assert stream.wait(PATIENCE)
    return stream


def log_steps(log: list[str], name: str, count: int = 50) -> Iterator[None]:
    for _ in range(count):
        log.append(name)
        yield
