"""Live updates: a run as frames, a bench as sentences, until the stream ends."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from specdemo.bench import BenchProgress
from specdemo.ui.frames import Run
from specdemo.ui.service import LaneEvents
from specdemo.ui.streams import drain, reason
from specdemo.ui.sweep import SweepResult
from specdemo.worker import Stream, Worker, WorkerGroup


async def played(run: Run, stream: LaneEvents, worker: Worker | WorkerGroup, shown: str) -> AsyncIterator[str]:
    """Yield every frame that differs from the previous one, initially `shown`; then finish the run."""
    async with aclosing(drain(stream)) as batches:
        async for batch in batches:
            start = len(run.records)
            for lane, event in batch:
                run.absorb(lane, event)
            if not stream.started and (ahead := worker.ahead(stream)):
                run.phase = ("queued", f"{ahead} ahead")
            frame = run.frame(start)
            if frame != shown:
                yield frame
                shown = frame
    run.finish(reason(stream.error) if stream.error else None)


async def followed(
    result: SweepResult, stream: Stream[BenchProgress | dict[str, Any]], worker: Worker | WorkerGroup
) -> AsyncIterator[str]:
    """Yield the progress of a bench whenever it changes; finally, how it ended."""
    began, shown = 0.0, ""
    async with aclosing(drain(stream)) as batches:
        async for batch in batches:
            for item in batch:
                result.absorb(item)
            began = began or (time.monotonic() if result.timing else 0.0)
            progress = result.progress(time.monotonic() - began, worker.ahead(stream))
            if progress != shown:
                yield progress
                shown = progress
    yield result.ending(reason(stream.error) if stream.error else "")
