"""What clients may call: `/generate` and `/preflight`. The parameters' names and usual values are theirs to see."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import gradio as gr

from specdemo.core import trace
from specdemo.core.errors import UserError
from specdemo.core.events import Loading
from specdemo.recipe import Recipe
from specdemo.ui.lane import SPEC
from specdemo.ui.service import Service
from specdemo.ui.settings import OFF, recipe_of
from specdemo.ui.streams import drain, reason
from specdemo.worker import WorkerBusy


def address_of(request: gr.Request) -> str:
    """Where a request comes from, as the server sees it; behind a proxy that is what `FORWARDED_ALLOW_IPS` decides."""
    return request.client.host if request.client else ""


def endpoints(service: Service, usual: Recipe, device: str) -> dict[str, Callable]:
    """The functions by their names."""

    async def generate(
        request: gr.Request,
        prompt: str,
        pair: str = usual.pair or "bundled",
        method: str = usual.method,
        gamma: int = usual.gamma,
        temperature: float = usual.temperature,
        top_p: float = usual.top_p,
        top_k: int = usual.top_k,
        seed: int = usual.seed,
        max_tokens: int = usual.max_tokens,
        rule: str = usual.rule,
        quantization: str = usual.quantization,
        drafter_quantization: str = usual.drafter_quantization,
        ngram: int = usual.ngram,
        filler_top_k: int = usual.filler_top_k,
        policy: str = usual.policy,
        top: int = 0,
        mode: str = OFF,
        remote: str = "",
        rtt_ms: float = 0,
    ) -> AsyncIterator[str]:
        """Decode a prompt. Streams the trace, a JSON line per item: a header, the steps, an end.

        `mode` other than off: the target is the service at `remote`, or where that is empty one beside the page.
        """
        asked = {
            "pair": pair,
            "method": method,
            "gamma": gamma,
            "policy": policy,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "max_tokens": max_tokens,
            "rule": rule,
            "quantization": quantization,
            "drafter_quantization": drafter_quantization,
            "ngram": ngram,
            "filler_top_k": filler_top_k,
            "top": top,
            "mode": mode,
            "remote": remote,
            "rtt_ms": rtt_ms,
        }
        try:
            stream = service.start([(SPEC, recipe_of(asked, device))], prompt, address=address_of(request))
        except (UserError, WorkerBusy) as error:
            raise gr.Error(reason(error), print_exception=False) from None
        async with aclosing(drain(stream)) as batches:
            async for batch in batches:
                for _, event in batch:
                    if not isinstance(event, Loading):
                        yield trace.write(event).rstrip()
        if stream.error:
            raise gr.Error(reason(stream.error), print_exception=False)

    async def preflight(
        request: gr.Request,
        pair: str = usual.pair or "bundled",
        method: str = usual.method,
        temperature: float = usual.temperature,
    ) -> dict[str, Any]:
        """What speed-up is to be expected of a pair and a method, without generating anything."""
        try:
            asked = {"pair": pair, "method": method, "temperature": temperature}
            return (await service.preflight(recipe_of(asked, device), address=address_of(request))).as_dict()
        except (UserError, WorkerBusy) as error:
            raise gr.Error(reason(error), print_exception=False) from None

    return {"generate": generate, "preflight": preflight}
