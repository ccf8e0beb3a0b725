"""Events of the page with values of wrong types: an answer of the endpoint, and no user text in the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.limited_page import limited_page
from specdemo.ui.limits import HostLimits

PATIENCE = 60.0
MARK = "visitor-text"


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with limited_page(HostLimits()) as served:
        yield served


def result(url: str, event: dict[str, Any], data: list[Any]) -> dict[str, Any]:
    session = {"session_hash": f"wrong-{event['id']}"}
    request = {"data": data, "fn_index": event["id"], **session}
    joined = httpx.post(f"{url}gradio_api/queue/join", json=request, timeout=PATIENCE)
    assert joined.status_code == 200
    with httpx.stream("GET", f"{url}gradio_api/queue/data", params=session, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            message = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if message.get("msg") in ("process_completed", "unexpected_error"):
                return message
    return {}


@pytest.mark.parametrize("value", [[MARK] * 1000, {MARK: 1}, MARK * 1000, True, -1e300, None])
def test_wrong_types_get_an_answer_and_one_short_log_line(
    page: Any, capfd: pytest.CaptureFixture[str], value: Any
) -> None:
    config = httpx.get(f"{page.url}config").json()
    events = [event for event in config["dependencies"] if event["backend_fn"]]
    assert len(events) > 10
    wrong = []
    for event in events:
        capfd.readouterr()
        answer = result(page.url, event, [value] * len(event["inputs"]))
        logged = "".join(capfd.readouterr())
        answered = answer and (answer["success"] or answer["output"]["error"])
        if not answered or MARK in logged or "Traceback" in logged:
            wrong.append((event["api_name"], event["targets"][:1], logged[-300:]))
    assert not wrong
