"""Requests for events of the page. Errors of Gradio, which quote the values of visitors, become sentences."""

from __future__ import annotations

from typing import Any

import gradio as gr

from specdemo.core.errors import UserError
from specdemo.ui.streams import reason
from specdemo.worker import WorkerBusy

MOST_VALUES, MOST_DEPTH = 20_000, 32


class PageBlocks(gr.Blocks):
    """Gradio blocks that answer every malformed event with a sentence; logs quote no visitor."""

    async def process_api(self, block_fn: Any, inputs: list[Any], *args: Any, **options: Any) -> dict[str, Any]:
        """Run an event, or the next step of a generator, `iterator`."""
        try:
            if options.get("iterator") is None:
                _check(block_fn, inputs)
            return await super().process_api(block_fn, inputs, *args, **options)
        except Exception as error:
            raise _sentence(error) from None


def _check(event: Any, inputs: list[Any]) -> None:
    if event.fn is None:
        raise UserError("there is no such event: reload the page")
    count = len(event.inputs)
    if len(inputs) != count:
        raise UserError(f"this event has {count} values: send a list of them, or reload the page")
    if not _is_plain(inputs):
        raise UserError("the values are too many, too deep, or files: reload the page")


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


def _sentence(error: Exception) -> gr.Error:
    if isinstance(error, gr.Error):
        return gr.Error(error.message, title=error.title, print_exception=False)
    text = reason(error)
    if not isinstance(error, (UserError, WorkerBusy, OSError)):
        text = "the page cannot use these values: reload it"
    return gr.Error(text, print_exception=False)
