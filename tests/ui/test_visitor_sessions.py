"""Sessions of visitors: the name of a session gives no access to its events or conversation."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fakes.served_page import page_application, visitor_of
from starlette.testclient import TestClient

from specdemo.ui.limits import PUBLIC
from specdemo.ui.visitor_sessions import COOKIE, hide_in_address, hide_in_body, new_cookie

pytestmark = pytest.mark.slow

API = "/gradio_api"
NAME = "known-session"
ADDRESS = ("192.0.2.1", 1)


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    with page_application(replace(PUBLIC, per_minute=None)) as (page, app), visitor_of(app) as client:
        client.get(f"{API}/startup-events")
        client.runs = page.health._service.runs
        client.forgetful = next(n for n, event in page.blocks.fns.items() if event.name == "forget" and event.queue)
        yield client


def visitor(app: Any, address: str = "192.0.2.1", browser: bool = True) -> TestClient:
    """Client on the page; a browser has the page's cookie."""
    client = visitor_of(app.app, client=(address, 1))
    client.portal = app.portal  # the event loop of the queue
    client.get("/config")
    if not browser:
        client.cookies.clear()
    return client


def events(client: TestClient, name: str = NAME) -> str:
    """Results of the session, up to the end of its events."""
    return client.get(f"{API}/queue/data", params={"session_hash": name}).text


def join(client: TestClient, number: int, name: Any = NAME) -> Any:
    return client.post(f"{API}/queue/join", json={"data": [], "fn_index": number, "session_hash": name})


@pytest.mark.parametrize("browser", [True, False])
@pytest.mark.parametrize("listener", [("192.0.2.1", True), ("192.0.2.2", False)])
def test_a_known_name_does_not_give_access_to_events(app: Any, browser: bool, listener: tuple[str, bool]) -> None:
    """Two browsers at one address have different cookies; a program is known by its address."""
    owner, other = visitor(app, browser=browser), visitor(app, *listener)
    assert join(owner, app.forgetful).status_code == 200
    assert '"session_not_found":true' in events(other)
    assert "process_completed" in events(owner)


@pytest.mark.parametrize("browser", [True, False])
def test_a_run_belongs_to_the_session_of_the_events_also_without_the_cookie(app: Any, browser: bool) -> None:
    client, run_id = visitor(app, browser=browser), f"run-of-a-session-{browser}"
    body = {"id": run_id, "session_hash": NAME, "settings": {"pair": "unknown"}}
    assert client.post("/runs", json=body).json()["phase"][0] == "failed"
    session = hide_in_body(request(cookie=client.cookies.get(COOKIE, "")), body)["session_hash"]
    assert app.runs.latest(session).id == run_id


def test_the_page_sets_a_secret_cookie_once(app: Any) -> None:
    client = visitor_of(app.app, client=ADDRESS)
    assert "set-cookie" not in client.get("/lessons/", follow_redirects=False).headers  # of another folder
    cookies = [client.get(path).headers.get("set-cookie") for path in ("/config", "/config", "/robots.txt")]
    assert cookies[0].startswith(f"{COOKIE}=") and "HttpOnly" in cookies[0] and "SameSite=Lax" in cookies[0]
    assert "path" not in cookies[0].lower()  # it belongs to the folder of the page
    assert cookies[1:] == [None, None] and len(client.cookies[COOKIE]) == 32
    assert visitor_of(app.app).get("/robots.txt").headers.get("set-cookie") is None


@pytest.mark.parametrize("name", ["short", "", "x" * 65, "a b c d e f", 12345678, ["session-of-a-visitor"], None])
def test_short_names_and_other_values_are_refused(app: Any, name: Any) -> None:
    client = visitor(app)
    assert join(client, app.forgetful, name).status_code == 400
    if isinstance(name, str):
        assert client.get(f"{API}/queue/data", params={"session_hash": name}).status_code == 400
        assert client.get(f"{API}/heartbeat/{name or '%20'}").status_code == 400
    if name is not None:
        assert client.post(f"{API}/cancel", json={"session_hash": name, "fn_index": 0, "event_id": "x"}).is_client_error


def request(path: str = "/", query: bytes = b"", cookie: str = "", scheme: str = "http") -> dict[str, Any]:
    headers = [(b"cookie", f"{COOKIE}={cookie}".encode())] if cookie else []
    return {
        "type": "http",
        "path": path,
        "query_string": query,
        "headers": headers,
        "client": ADDRESS,
        "scheme": scheme,
    }


def test_names_are_replaced_alike_in_every_part_of_a_request() -> None:
    cookie = "c" * 32
    body = hide_in_body(request(cookie=cookie), {"session_hash": NAME, "data": [NAME]})
    hidden = body["session_hash"]
    assert NAME not in hidden and body["data"] == [NAME] and len(hidden) == 64
    query = request(query=f"x={NAME}&session_hash={NAME}".encode(), cookie=cookie)
    path = request(f"{API}/heartbeat/{NAME}", cookie=cookie)
    hide_in_address(query)
    hide_in_address(path)
    assert query["query_string"] == f"x={NAME}&session_hash={hidden}".encode()
    assert path["path"] == f"{API}/heartbeat/{hidden}" and path["raw_path"] == path["path"].encode()
    for other in ("d" * 32, "", "short"):
        assert hide_in_body(request(cookie=other), {"session_hash": NAME})["session_hash"] != hidden


def test_cookies_of_frames_of_other_sites_need_encryption() -> None:
    assert new_cookie(request(), framed=True).endswith("; Secure; SameSite=None; Partitioned")
    assert new_cookie(request(scheme="https"), framed=False).endswith("; SameSite=Lax; Secure")
    assert "Secure" not in new_cookie(request(), framed=False)
    assert new_cookie(request(cookie="c" * 32), framed=False) is None
    assert new_cookie(request(cookie="short"), framed=False)
