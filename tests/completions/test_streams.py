"""Streams that wait: comments keep the connection open, and later errors are events."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
from fakes.running_service import running_service
from fakes.tiny_models import TEMPLATE

from specdemo.completions.answer import Answer
from specdemo.completions.responses import COMMENT
from specdemo.completions.routes import kept_open
from specdemo.core.errors import PromptTooLong
from specdemo.core.events import StepEvent
from specdemo.core.step import Draft, Step, Verdict
from specdemo.recipe import Recipe

AT_ONCE = 0.001


def test_comments_are_sent_until_the_next_chunk() -> None:
    async def collect() -> list[bytes]:
        seen, ready = [], asyncio.Event()

        async def chunks() -> AsyncGenerator[bytes, None]:
            yield b"first"
            await ready.wait()
            yield b"second"

        async for chunk in kept_open(chunks(), AT_ONCE):
            seen.append(chunk)
            if seen.count(COMMENT) == 2:
                ready.set()
        return seen

    seen = asyncio.run(collect())
    assert seen[0] == b"first" and seen[-1] == b"second" and {*seen[1:-1]} == {COMMENT} and len(seen) >= 4


def test_a_closed_stream_closes_its_chunks() -> None:
    closed = []

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            closed.append(True)

    async def leave() -> None:
        stream = kept_open(chunks(), AT_ONCE)
        assert await anext(stream) == COMMENT
        await stream.aclose()

    asyncio.run(leave())
    assert closed == [True]


def body(path: str, text: str, stream: bool = True) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": text}]} if path.startswith("chat") else {"prompt": text}
    return {"model": "default", "stream": stream, **prompt}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "failure"), [("completions", None), ("chat/completions", PromptTooLong(9, 8))])
def test_a_waiting_request_gets_comments_and_then_its_answer_or_error(path: str, failure: Exception | None) -> None:
    with running_service(Recipe(pair="bundled", max_tokens=4), TEMPLATE) as (url, service):
        service.keep_alive_s = AT_ONCE
        commented, original = threading.Event(), service.events

        def events(*given: Any) -> Iterator[Any]:
            assert commented.wait(60)
            if failure is not None:
                raise failure
            yield from original(*given)

        service.events = events  # type: ignore[method-assign]
        with httpx.stream("POST", f"{url}/v1/{path}", json=body(path, "x"), timeout=60) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert f"{next(lines)}\n\n".encode() == COMMENT
            commented.set()
            data = [line for line in lines if line.startswith("data: ")]
        if failure is None:
            assert data[-1] == "data: [DONE]"
        else:
            assert json.loads(data[-1].removeprefix("data: "))["error"]["code"] == "context_length_exceeded"


@pytest.mark.slow
def test_long_prompts_have_code_and_counts() -> None:
    with running_service(Recipe(pair="bundled", max_tokens=4), TEMPLATE) as (url, service):
        for path in ("completions", "chat/completions"):
            for text, stream in (("word " * 3000, True), ("x" * (1 << 17), False)):
                response = httpx.post(f"{url}/v1/{path}", json=body(path, text, stream), timeout=60)
                error = response.json()["error"]
                assert response.status_code == 400 and error["code"] == "context_length_exceeded"
                assert f"maximum context length is {service.target.context:,} tokens" in error["message"]


def test_emitted_tokens_are_counted_where_a_text_ends_inside_a_draft() -> None:
    answer = Answer()
    for tokens, accepted in (((1, 2, 3, 4), (0, 1, 2)), ((5, 6), (0, 1))):  # the second has no bonus
        step = Step(1, tokens, Draft.chain((1, 2, 3)), Verdict(accepted, None), 3, 0.0, 0.0, 0.0, 1.0)
        answer.add(StepEvent(step, ("x",) * len(tokens)))
    statistics = answer.counts.statistics(3)
    assert statistics["mean_acceptance_length"] == (4 + 2) / 2 and statistics["num_accepted_draft_tokens"] == 5
