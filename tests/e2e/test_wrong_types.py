"""Events of the page with values of wrong types: an answer of the endpoint, and no user text in the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.limited_page import limited_page
from specdemo.ui.limits import HostLimits

pytestmark = pytest.mark.slow

PATIENCE = 60.0
MARK = "visitor-text"


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with limited_page(HostLimits()) as served:
        yield served


@pytest.fixture(scope="module")
def client(page: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page.url, timeout=PATIENCE) as client:
        yield client


def join(client: httpx.Client, event: dict[str, Any], value: Any) -> dict[str, str]:
    """Queue an event with `value` for every input; return its session."""
    session = {"session_hash": f"wrong-values-{event['id']}"}
    request = {"data": [value] * len(event["inputs"]), "fn_index": event["id"], **session}
    assert client.post("gradio_api/queue/join", json=request).status_code == 200
    return session


def result(client: httpx.Client, session: dict[str, str]) -> dict[str, Any]:
    with client.stream("GET", "gradio_api/queue/data", params=session) as response:
        for line in response.iter_lines():
            message = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if message.get("msg") in ("process_completed", "unexpected_error"):
                return message
    return {}


@pytest.mark.parametrize(
    "value",
    [
        [MARK] * 100,
        MARK * 1000,
        *(pytest.param(value, marks=pytest.mark.exhaustive) for value in (-1e300, None, {MARK: 1}, True)),
    ],
)
def test_wrong_types_get_an_answer_and_one_short_log_line(
    client: httpx.Client, capfd: pytest.CaptureFixture[str], value: Any
) -> None:
    """All events are queued before the first answer is read."""
    config = client.get("config").json()
    events = [event for event in config["dependencies"] if event["backend_fn"]]
    assert len(events) > 10
    capfd.readouterr()
    sessions = [join(client, event, value) for event in events]
    wrong = []
    for event, session in zip(events, sessions, strict=True):
        answer = result(client, session)
        if not answer or not (answer["success"] or answer["output"]["error"]):
            wrong.append((event["api_name"], event["targets"][:1], answer))
    logged = "".join(capfd.readouterr())
    assert not wrong and MARK not in logged and "Traceback" not in logged, (wrong, logged[-2000:])
