"""Asynchronous reading of worker jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TypeVar

from specdemo.worker import Stream

T = TypeVar("T")


async def read_batches(stream: Stream[T], interval_s: float = 0.0) -> AsyncGenerator[list[T]]:
    """Yield new items of a job, at most every `interval_s` seconds; none if its place in the queue changed.

    Closing the iterator stops the job.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(changed.set)

    count = 0
    stream.listen(notify)
    try:
        while True:
            changed.clear()
            done = stream.done  # read first: items are appended before a stream is done
            items = stream.items[count:]
            count += len(items)
            yield items
            if done:
                return
            await asyncio.sleep(interval_s)
            await changed.wait()
    finally:
        if not stream.done:
            stream.stop()
