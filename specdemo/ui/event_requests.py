"""Validation of requests for events, before Gradio processes them: its errors quote the values of visitors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

MOST_VALUES, MOST_DEPTH = 20_000, 32


@dataclass(frozen=True)
class KnownEvents:
    """Events of the page with a Python function, and functions of components that browsers call."""

    inputs: Mapping[int, int]  # number of inputs by event
    names: Mapping[str, int]  # event by API name
    functions: Mapping[int, frozenset[str]]  # names of functions by component

    @classmethod
    def of(cls, blocks: Any) -> KnownEvents:
        """Return the events of Gradio blocks."""
        events = {number: event for number, event in blocks.fns.items() if event.fn is not None}
        functions = {
            number: frozenset(name for name in dir(block) if _is_server_function(block, name))
            for number, block in blocks.blocks.items()
        }
        return cls(
            {number: len(event.inputs) for number, event in events.items()},
            {str(event.api_name): number for number, event in events.items()},
            {number: names for number, names in functions.items() if names},
        )

    def problem(self, path: str, value: Mapping[str, Any]) -> str | None:
        """Return the reason to refuse a request with this JSON object to a route of events, or None."""
        route, _, name = path.removeprefix("/gradio_api/").rstrip("/").partition("/")
        if route == "component_server":
            number, names = value.get("component_id"), self.functions
            known = type(number) is int and value.get("fn_name") in names.get(number, ())
            return None if known else "there is no such function"
        if route not in ("queue", "run", "call"):
            return None
        event = value.get("fn_index")
        event = self.names.get(name) if event is None and route != "queue" else event
        if type(event) is not int or event not in self.inputs:
            return "there is no such event: reload the page"
        data, count = value.get("data"), self.inputs[event]
        if not isinstance(data, list) or len(data) != count:
            return f"this event has {count} values: send a list of them, or reload the page"
        return None if _is_plain(data) else "the values are too many, too deep, or files"


def _is_server_function(block: Any, name: str) -> bool:
    return getattr(getattr(block, name, None), "_is_server_fn", False)


def _is_plain(data: list[Any]) -> bool:
    level, count = data, 0
    for _ in range(MOST_DEPTH):
        count += len(level)
        if count > MOST_VALUES or any(isinstance(value, dict) and "meta" in value for value in level):
            return False
        nested = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [item for value in nested if isinstance(value, list) for item in value]
        if not level:
            return True
    return False


def guarded(call: Callable[..., Any], convert: Callable[[Exception], Exception]) -> Callable[..., Any]:
    """Return the function or generator `call` with its exceptions converted."""

    @contextmanager
    def converted() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise convert(error) from None

    async def async_steps(*args: Any) -> AsyncIterator[Any]:
        with converted():
            async with aclosing(call(*args)) as items:
                async for item in items:
                    yield item

    async def async_call(*args: Any) -> Any:
        with converted():
            return await call(*args)

    def steps(*args: Any) -> Iterator[Any]:
        with converted():
            yield from call(*args)

    def plain(*args: Any) -> Any:
        with converted():
            return call(*args)

    for matches, wrapper in (
        (inspect.isasyncgenfunction, async_steps),
        (inspect.iscoroutinefunction, async_call),
        (inspect.isgeneratorfunction, steps),
    ):
        if matches(call):
            return functools.wraps(call)(wrapper)
    return functools.wraps(call)(plain)
