"""API endpoints `/generate` and `/preflight` of the page. Their parameters are the options of the schema."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import gradio as gr

from specdemo.core import trace
from specdemo.core.errors import UserError
from specdemo.core.events import INTERRUPTED, End, Loading, StepEvent
from specdemo.core.metrics import Metrics
from specdemo.option_rules import refuse_ineffective
from specdemo.preflight import Preflight
from specdemo.recipe import Recipe
from specdemo.ui.lane import SPEC
from specdemo.ui.limits import address_of
from specdemo.ui.service import FRAME_S, LaneEvents, Service, error_sentence, prediction_job, read_result
from specdemo.ui.settings import OPTIONS, recipe_of, setting_of
from specdemo.worker import read_batches


def endpoints(service: Service, initial: Recipe, device: str) -> dict[str, Callable[..., Any]]:
    defaults = api_defaults(initial)

    def recipe_from(values: tuple[Any, ...]) -> Recipe:
        settings = dict(zip(defaults, values, strict=True))
        service.limits.check_settings(settings, defaults)
        chosen = recipe_of(settings, device)
        if chosen.ngram_keep:
            raise UserError("ngram_keep has no effect in the API, whose calls share no state: use the page")
        refuse_ineffective(chosen, [name for name, value in settings.items() if value != defaults[name]])
        return chosen

    async def generate(request: gr.Request, prompt: str, *values: Any) -> AsyncIterator[str]:
        """Decode a prompt. Stream the trace as JSON lines: a header, the steps, an end.

        `mode` other than off: the target is the service at `remote`, or a local service if that is empty.
        """
        stream = service.start([(SPEC, recipe_from(values))], prompt, address=address_of(request))
        async with aclosing(_trace_lines(stream)) as lines:
            async for line in lines:
                yield line

    async def preflight(request: gr.Request, *values: Any) -> dict[str, Any]:
        """Estimate the speed-up of a pair and a method before a run."""
        stream = service.measure(prediction_job(service, recipe_from(values)), address_of(request))
        return (await read_result(stream, Preflight)).as_dict()

    return {"generate": _with_parameters(generate, defaults), "preflight": _with_parameters(preflight, defaults)}


async def _trace_lines(stream: LaneEvents) -> AsyncGenerator[str]:
    metrics = Metrics()
    started = ended = False
    async with aclosing(read_batches(stream, FRAME_S)) as batches:
        async for batch in batches:
            for _, event in batch:
                if isinstance(event, Loading):
                    continue
                started, ended = True, isinstance(event, End)
                if isinstance(event, StepEvent):
                    metrics = event.metrics
                yield trace.write(event).rstrip()
    if started and not ended and not stream.error:  # stopped, for example because the program terminates
        yield trace.write(End("cancelled", INTERRUPTED, metrics)).rstrip()
    if stream.error:
        raise gr.Error(error_sentence(stream.error), print_exception=False)


def api_defaults(initial: Recipe) -> dict[str, Any]:
    values = {name: setting_of(option, getattr(initial, name, option.default)) for name, option in OPTIONS.items()}
    return {**values, "top": 0}  # the page records distributions for its inspector, the API does not


def _with_parameters(function: Callable[..., Any], defaults: dict[str, Any]) -> Callable[..., Any]:
    """Replace `*values` in the signature by a typed parameter per option, for the description of the API."""
    types = {
        name: (list[str] if option.choices else str) if option.many else option.type for name, option in OPTIONS.items()
    }
    fixed = [part for part in inspect.signature(function).parameters.values() if part.kind is not part.VAR_POSITIONAL]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = [inspect.Parameter(name, kind, default=value, annotation=types[name]) for name, value in defaults.items()]
    vars(function)["__signature__"] = inspect.signature(function).replace(parameters=[*fixed, *named])
    function.__annotations__ = {
        **{name: hint for name, hint in inspect.get_annotations(function, eval_str=True).items() if name != "values"},
        **types,
    }
    return function
