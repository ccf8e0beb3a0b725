"""A run as frames, or a bench as sentences, for as long as its stream lasts. Knows runs and streams; no gradio."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from specdemo.bench import BenchProgress
from specdemo.ui.frames import Run
from specdemo.ui.service import Lines
from specdemo.ui.streams import drain, reason
from specdemo.ui.sweep import SweepResult
from specdemo.worker import Stream, Worker, WorkerGroup


async def played(run: Run, stream: Lines, worker: Worker | WorkerGroup, shown: str) -> AsyncIterator[str]:
    """A frame whenever it differs from the one before, which at first was `shown`; then the run is finished."""
    async with aclosing(drain(stream)) as batches:
        async for batch in batches:
            at = len(run.records)
            for lane, event in batch:
                run.absorb(lane, event)
            if not stream.started and (ahead := worker.ahead(stream)):
                run.phase = ("queued", f"{ahead} ahead")
            now = run.frame(at)
            if now != shown:
                yield now
                shown = now
    run.finish(reason(stream.error) if stream.error else None)


async def followed(
    outcome: SweepResult, stream: Stream[BenchProgress | dict[str, Any]], worker: Worker | WorkerGroup
) -> AsyncIterator[str]:
    """What is being measured, whenever that has changed; at last how it ended."""
    began, said = 0.0, ""
    async with aclosing(drain(stream)) as batches:
        async for batch in batches:
            for item in batch:
                outcome.absorb(item)
            began = began or (time.monotonic() if outcome.timing else 0.0)
            now = outcome.progress(time.monotonic() - began, worker.ahead(stream))
            if now != said:
                yield now
                said = now
    yield outcome.ending(reason(stream.error) if stream.error else "")
