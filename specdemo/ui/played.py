"""A run as frames for the page, for as long as its stream lasts. Knows runs and streams; no gradio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from specdemo.ui.frames import Run
from specdemo.ui.service import Lines
from specdemo.ui.streams import drain, reason
from specdemo.worker import Crew, Worker


async def played(run: Run, stream: Lines, worker: Worker | Crew, shown: str) -> AsyncIterator[str]:
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
