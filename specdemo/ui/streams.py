"""What the worker gives, for whoever waits for it without a thread. Knows nothing of gradio.

A stream is drained a dozen times a second at most; leaving it (end, Stop, a closed tab, an error) asks it to stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from specdemo.core.errors import UserError
from specdemo.worker import Stream, WorkerBusy

TICK = 1 / 12  # seconds between frames: never 150 ms behind, and little load on the decoding thread
LONGEST_REASON = 600  # characters; a refusal quotes what it refuses, and that may be anything
log = logging.getLogger(__name__)


async def drain(stream: Stream) -> AsyncIterator[list]:
    """Whatever is new, again and again until the job is over. Leaving early asks the job to stop."""
    read = 0
    try:
        while True:
            last = stream.done  # before draining, or the tail is lost
            fresh = stream.items[read:]
            read += len(fresh)
            yield fresh
            if last:
                return
            await asyncio.sleep(TICK)
    finally:
        stream.stop()


def reason(error: BaseException) -> str:
    """One sentence about what went wrong, for whoever asked for the run."""
    if isinstance(error, (UserError, WorkerBusy)):
        said = str(error)
    else:
        log.error("a run failed", exc_info=error)
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]} …"
