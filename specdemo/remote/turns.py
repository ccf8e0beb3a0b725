"""A request's turn at the device: it waits for the one worker, and gives up its place when whoever sent it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from fastapi import Request

from specdemo.core.errors import Refused
from specdemo.remote.contexts import Stale, Unknown
from specdemo.remote.wire import Problem
from specdemo.worker import Worker, WorkerBusy


class Trouble(Exception):
    """A request that is answered with a `Problem`."""

    def __init__(self, status: int, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.problem = status, Problem(error=sentence, code=code)


def _translated(error: BaseException) -> BaseException:
    """What the worker raised, as an answer where it is one."""
    if isinstance(error, Unknown):
        return Trouble(404, "unknown_context", str(error))
    if isinstance(error, Stale):
        return Trouble(409, "stale", str(error))
    if isinstance(error, Refused):
        return Trouble(422, "invalid", str(error))
    return error


async def stream(worker: Worker, make: Callable[[], Iterator[Any]]) -> AsyncIterator[Any]:
    """What `make()` yields in the worker's thread, as it comes. Leaving early stops it before its next step."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def tell(kind: str, value: Any = None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, (kind, value))

    def job() -> Iterator[None]:
        try:
            for item in make():
                tell("item", item)
                yield
        except Exception as error:  # whatever it is, it belongs to whoever asked
            tell("error", error)
            return
        tell("end")

    try:
        stream = worker.submit(job)
    except WorkerBusy as busy:
        raise Trouble(429, "busy", str(busy)) from busy
    try:
        while True:
            kind, value = await queue.get()
            if kind == "end":
                return
            if kind == "error":
                raise _translated(value)
            yield value
    finally:
        stream.stop()


async def in_turn(worker: Worker, request: Request, call: Callable[[], Any]) -> Any:
    """The result of `call()` in the worker's thread; nothing is computed for an edge that hung up while it waited."""
    results = stream(worker, lambda: iter((call(),)))

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, hung_up = asyncio.ensure_future(anext(results)), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Trouble(400, "gone", "the request was given up")
        return answer.result()
    finally:
        for task in (answer, hung_up):
            task.cancel()
        await asyncio.gather(answer, hung_up, return_exceptions=True)
        await results.aclose()
