"""Asynchronous access to the worker's output streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from specdemo.core.errors import UserError
from specdemo.worker import Stream, WorkerBusy

_POLL_S = 1 / 12  # seconds between polls: latency below 150 ms at low load on the decoding thread
LONGEST_REASON = 600  # characters; error messages can quote arbitrary input
log = logging.getLogger(__name__)


async def drain(stream: Stream) -> AsyncIterator[list]:
    """Yield new items until the job has finished. Closing the iterator cancels the job."""
    count = 0
    try:
        while True:
            done = stream.done  # read before draining, otherwise the last items are lost
            items = stream.items[count:]
            count += len(items)
            yield items
            if done:
                return
            await asyncio.sleep(_POLL_S)
    finally:
        stream.stop()


def reason(error: BaseException) -> str:
    """Convert an exception to a sentence for the visitor; log unexpected exceptions."""
    if isinstance(error, (UserError, WorkerBusy)):
        text = str(error)
    else:
        log.error("a run failed", exc_info=error)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"
