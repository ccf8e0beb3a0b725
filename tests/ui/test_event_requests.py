"""Every event of the page with missing, surplus, wrong and huge values: a sentence, and no text of visitors in logs."""

import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fakes.served_page import page_application, visitor_of
from starlette.testclient import TestClient

from specdemo.ui import service
from specdemo.ui.limits import PUBLIC

pytestmark = [pytest.mark.slow, pytest.mark.long]

API = "/gradio_api"
SECRET = "zebra-in-a-prompt"
SESSION = "session-of-all-events"  # Gradio copies every component for a new session
LIMITS = replace(PUBLIC, per_minute=None, at_once=None, max_seconds=0.05)
WRONG: list[Any] = [None, SECRET, [SECRET, [SECRET]], {SECRET: SECRET}, 1e308, True, SECRET * 1000]


EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])


class Browser:
    """Client of the page that reads the results of queued events; in one session."""

    def __init__(self, client: TestClient, page: Any) -> None:
        self.client, self.page = client, page

    def call(self, number: int, data: Any) -> tuple[int, str]:
        """Send an event; return the status and the result."""
        event = self.page.blocks.fns[number]
        body = {"data": data, "fn_index": number, "session_hash": SESSION}
        route = "queue/join" if event.queue else f"run/{event.api_name}"
        response = self.client.post(f"{API}/{route}", json=body)
        if response.status_code == 200 and event.queue:
            response = self.client.get(f"{API}/queue/data?session_hash={SESSION}")
        return response.status_code, response.text


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "PROMPTS_PER_KIND", 1)  # some variants are valid and start a preflight
        with page_application(LIMITS) as (page, app), visitor_of(app, raise_server_exceptions=False) as client:
            client.get(f"{API}/startup-events")
            yield Browser(client, page)


@pytest.fixture
def logged(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Return a function that returns all logged, printed or warned text."""
    caplog.set_level(logging.DEBUG)
    for client in ("httpx", "httpcore", "httpx2", "asyncio"):
        logging.getLogger(client).setLevel(logging.ERROR)  # the client of the test
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: "".join([*capfd.readouterr(), caplog.text, *(str(warning.message) for warning in caught)])


def variants(defaults: list[Any], values: list[Any]) -> Iterator[list[Any]]:
    """Yield data with missing, surplus and wrong values, alone and next to valid ones."""
    yield []
    yield [*defaults, SECRET]
    for wrong in values if defaults else ():
        yield [wrong] * len(defaults)
        yield [wrong, *defaults[1:]]


@EVERY
def test_every_event_answers_arbitrary_values_without_logging_them(browser: Browser, logged: Any, every: bool) -> None:
    blocks, problems = browser.page.blocks, []
    for number, event in blocks.fns.items():
        defaults = [getattr(block, "value", None) for block in event.inputs]
        values = WRONG if every else [WRONG[number % len(WRONG)]]
        for data in variants(json.loads(json.dumps(defaults, default=str)), values):
            status, text = browser.call(number, data)
            log = logged()
            if status >= 500 or SECRET in log or "Traceback" in text:
                problems.append((event.name, str(data)[:40], status, text[:100], log[-300:]))
            if len(data) < len(event.inputs) or event.fn is None:
                assert "reload" in text
    assert not problems, problems


DEEP = f'{{"data": {"[" * 100_000 + "]" * 100_000}, "fn_index": 0}}'
SESSION_OF_TEST = {"session_hash": "session-of-a-test"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("queue/join", {"data": [], "fn_index": 999, **SESSION_OF_TEST}, 500),
        ("queue/join", {"data": SECRET, "fn_index": 0, **SESSION_OF_TEST}, 422),
        ("run/generate", {"data": [SECRET], "fn_index": 999, **SESSION_OF_TEST}, 500),
        ("queue/join", [SECRET], 400),
        ("cancel", {"session_hash": SECRET, "fn_index": SECRET, "event_id": [SECRET]}, 422),
        ("queue/join", DEEP, 400),
        ("queue/join", b"\xff\xfe" + SECRET.encode(), 400),
    ],
)
def test_unknown_events_and_malformed_bodies_get_a_sentence(
    browser: Browser, logged: Any, path: str, body: Any, status: int
) -> None:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    headers = {"content-type": "application/json"}
    response = browser.client.post(f"{API}/{path}", content=content, headers=headers)
    assert response.status_code == status and "detail" in response.json() and SECRET not in logged()


def test_files_and_other_types_of_bodies_are_refused(browser: Browser) -> None:
    events = browser.page.blocks.fns.items()
    one = next(number for number, event in events if event.fn and event.queue and len(event.inputs) == 1)
    file = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    for value in (file, [[file]], {"x": file}):
        assert browser.call(one, [value]) == (400, '{"detail":"files are not accepted: reload the page"}')
    for value in ([0] * 500_000, json.loads("[" * 500 + "]" * 500)):
        status, text = browser.call(one, [value])
        assert status == 200 and "process_completed" in text
    sent = {"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}}
    assert browser.client.post(f"{API}/queue/join", **sent).status_code == 415


@EVERY
def test_a_run_with_arbitrary_values_gets_a_sentence(browser: Browser, logged: Any, every: bool) -> None:
    valid = {"session_hash": "session-of-a-test", "settings": {}, "lanes": [], "turn": "new"}
    bodies = [valid | {name: wrong} for name in ("id", *valid) for wrong in WRONG]
    settings = ("prompt", "compare", "pair", "method", "gamma", "temperature", "gates", "seed", "drafter")
    for first, setting in enumerate(settings):
        values = WRONG if every else WRONG[first % 3 :: 3]
        bodies += [valid | {"settings": {setting: wrong}} for wrong in values]
    bodies += [valid | {"lanes": [wrong]} for wrong in WRONG]
    for number, body in enumerate(bodies):
        response = browser.client.post("/runs", json={"id": f"run-of-a-test-{every}-{number:06}", **body})
        answer = response.json()
        words = answer["phase"][0] if response.status_code == 200 else answer["detail"]
        assert response.status_code in (200, 400, 422) and words and SECRET not in logged(), body
    json_type = {"content-type": "application/json"}
    response = browser.client.post("/runs", content="[" * 100_000, headers=json_type)
    assert response.status_code == 400 and "not JSON" in response.json()["detail"]
