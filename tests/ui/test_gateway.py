"""Access to the page over HTTP: routes, hosts, origins, sizes, rates, sessions of visitors, malformed events."""

import asyncio
import json
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.page import ADDRESS as HERE
from fakes.page import page_application, visitor_of
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from specdemo.completions.routes import COMPLETION_ROUTES
from specdemo.remote import admission
from specdemo.remote.access import RouteInfo, is_known_host
from specdemo.remote.server import SERVICE_ROUTES
from specdemo.ui import service
from specdemo.ui.gateway import (
    COOKIE,
    PAGE_ROUTES,
    Gateway,
    gateway,
    hide_in_address,
    hide_in_body,
    new_cookie,
    space_hosts,
)
from specdemo.ui.limits import PUBLIC, read_limits
from specdemo.ui.run_store import RECORDED

pytestmark = [pytest.mark.slow, pytest.mark.long]

API = "/gradio_api"


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with page_application(replace(PUBLIC, max_trace=100_000, per_minute=4)) as (_, app):
        yield app


@pytest.fixture(scope="module")
def browser(served: Any) -> TestClient:
    return visitor_of(served, raise_server_exceptions=False)


def test_every_other_route_is_disabled(served: Any, browser: TestClient) -> None:
    listed = {(method, route.path) for route in PAGE_ROUTES for method in route.methods.split(", ")}
    present = []
    for route in served.routes:
        for part in getattr(getattr(route, "original_router", None), "routes", [route]):  # of an included router
            present += [(method, part.path) for method in getattr(part, "methods", None) or {"WEBSOCKET"}]
    sized = {("GET", "/pwa_icon/192"), ("GET", "/pwa_icon/512")}
    assert listed - sized <= set(present) and len(present) > 60
    for method, path in present:
        if method in ("GET", "POST") and (method, path.rstrip("/") or "/") not in listed:
            response = browser.request(method, path.replace("{size}", "40000").replace("{", "").replace("}", ""))
            assert response.status_code == 404, path
    for path in (f"{API}/upload", f"{API}/upload/"):
        assert browser.post(path, files={"files": ("a", b"x")}).status_code == 404
    assert browser.get("/pwa_icon/192").status_code == 200


def route_table(routes: Iterable[RouteInfo]) -> str:
    rows = [f"| `{route.methods} {route.path}` | {route.purpose} | {route.limits} |" for route in routes]
    return "\n".join(["| route | purpose | limits |", "|---|---|---|", *rows])


def test_routes_are_documented() -> None:
    """Otherwise copy the output of `route_table`."""
    text = (Path(__file__).parents[2] / "docs/hosting.md").read_text("utf-8")
    assert all(route_table(routes) in text for routes in (PAGE_ROUTES, SERVICE_ROUTES, COMPLETION_ROUTES))
    assert all(route.purpose for route in PAGE_ROUTES)


KNOWN_HOSTS = ("127.0.0.1:7860", "localhost:7860", "192.168.1.5:7860", "[::1]:7860", "localhost.:7860")
OTHER_HOSTS = (
    "",
    "evil.example",
    "localhost.evil.example",
    "evil.example:80@127.0.0.1",
    "[::1].evil",
    "[::1",
    "::1",
    "[evil.example]",
    "localhost:80/evil",
    "localhost:99999",
    "127.0.0.1#",
    "127.0.0.1 evil",
    "%6cocalhost",
)


def test_unknown_host_names_are_refused(browser: TestClient) -> None:
    def status(**headers: str) -> int:
        return browser.get("/robots.txt", headers=headers).status_code

    assert {host: status(Host=host) for host in KNOWN_HOSTS} == dict.fromkeys(KNOWN_HOSTS, 200)
    assert {host: status(Host=host) for host in OTHER_HOSTS} == dict.fromkeys(OTHER_HOSTS, 403)
    assert status(**{"Host": "evil.example", "X-Forwarded-Host": "localhost"}) == 403


def test_hosts_of_a_page_are_configured() -> None:
    assert read_limits({"SPECDEMO_HOSTS": "a.example, b.example"}).hosts == ("a.example", "b.example")
    assert read_limits({}).hosts == () and read_limits({"SPECDEMO_HOSTS": "any"}).hosts is None
    space = space_hosts({"SPACE_HOST": "someone-page.hf.space"})
    assert is_known_host("someone-page.hf.space", space) and not is_known_host("other-page.hf.space", space)
    shared = ["*.gradio.live"]
    assert is_known_host("x.gradio.live", shared) and not is_known_host("gradio.live.evil", shared)


FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "http://127.0.0.1:8000"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": HERE},
    {"Sec-Fetch-Site": "none", "Origin": "http://evil.example"},
    {"Sec-Fetch-Site": "none", "Origin": "null"},
    {"Sec-Fetch-Site": "", "Origin": HERE},
    {"Origin": f"{HERE}@evil.example"},
    {"Origin": f"http://evil.example@{HERE.partition('//')[2]}"},
    {"Origin": f"chrome-extension://{HERE.partition('//')[2]}"},
    {"Origin": f"{HERE}.evil.example"},
]


def test_other_sites_cannot_change_state(browser: TestClient) -> None:
    for headers in FOREIGN:
        assert browser.post(f"{API}/reset", json={}, headers=headers).status_code == 403, headers
        with pytest.raises(WebSocketDisconnect) as closed, browser.websocket_connect("/frames/x", headers=headers):
            pass
        assert closed.value.code == 1008
        assert browser.get("/robots.txt", headers=headers).status_code == 200  # links of other sites


OWN = [
    {},
    {"Origin": HERE},
    {"Origin": HERE, "Sec-Fetch-Site": "same-origin"},
    {"Origin": "https://behind.proxy", "Sec-Fetch-Site": "same-origin"},  # a proxy changes the host
    {"Origin": HERE, "Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "none"},
]


def test_own_page_and_programs_may_change_state(browser: TestClient) -> None:
    for headers in OWN:
        assert browser.post(f"{API}/reset", json={}, headers=headers).status_code not in (403, 404), headers


def test_security_headers(browser: TestClient) -> None:
    for path in ("/config", "/robots.txt", "/nowhere"):
        headers = browser.get(path).headers
        assert "frame-ancestors 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


SPACE = {"SPACE_ID": "someone/page"}
ROOT = '"root":"https://someone-page.hf.space/--replicas/a1"'


def guarded(environment: dict[str, str], **options: Any) -> TestClient:
    """Visitor of a small application behind the middleware of the page."""
    middleware, _ = gateway(read_limits(environment), environment)
    routes = [Route("/lessons", lambda _: HTMLResponse(f"<script>gradio_config = {{{ROOT}}}</script>"))]
    return TestClient(Starlette(routes=routes, middleware=middleware), base_url=HERE, **options)


@pytest.mark.parametrize(
    ("environment", "ancestors"),
    [
        ({}, "'self'"),
        ({"SPECDEMO_FRAMES": "https://a.example, http://b:8000"}, "'self' https://a.example http://b:8000"),
        (SPACE, "'self' https://huggingface.co https://*.hf.space"),
    ],
)
def test_only_listed_sites_may_frame_the_page(environment: dict[str, str], ancestors: str) -> None:
    headers = guarded(environment).get("/lessons").headers
    assert headers["content-security-policy"].endswith(f"; frame-ancestors {ancestors}")
    assert ("SameSite=None" in headers["set-cookie"]) == (ancestors != "'self'")


def test_addresses_derive_from_the_location_except_on_a_space() -> None:
    """A Space may have replicas, each with a path of its own."""
    assert ROOT in guarded(SPACE).get("/lessons").text
    page = guarded({}).get("/lessons").text
    assert ROOT not in page and '"root":document.baseURI' in page


@pytest.mark.parametrize("root", ["/demo", "/demo/", "demo", "https://school.example/demo"])
def test_proxies_keep_or_remove_the_path_of_the_page(root: str) -> None:
    page = guarded({}, root_path=root)
    assert [page.get(path).status_code for path in ("/demo/lessons", "/lessons")] == [200, 200]
    refused = page.get("/demonstration/lessons")
    assert refused.status_code == 404 and "GRADIO_ROOT_PATH" in refused.json()["detail"]


def test_large_requests_are_refused(browser: TestClient) -> None:
    kind, lines = {"Content-Type": "application/json"}, {"Content-Type": "application/x-ndjson"}
    assert "at most 100,000 are read" in browser.post("/traces", content="x" * 200_000, headers=lines).json()["refused"]
    assert browser.post("/traces", content="x" * 200_001, headers=lines).status_code == 413
    assert browser.post("/traces", content="x", headers=kind).status_code == 415
    for route in ("/runs", f"{API}/queue/join"):
        assert browser.post(route, content=b"x" * 2_000_001, headers=kind).status_code == 413
    chunks = iter([b"[" + b"1," * 600_000, b"1," * 600_000 + b"1]"])  # of unknown length
    response = browser.post("/runs", content=chunks, headers=kind)
    assert response.status_code == 413


def test_opened_traces_count_as_runs_and_requests_are_limited(served: Any) -> None:
    visitor, other = (visitor_of(served, client=(address, 1)) for address in ("192.0.2.7", "192.0.2.8"))
    name = "hybrid, short answer"
    text = (RECORDED / f"{name}.jsonl").read_text("utf-8")
    lines = {"Content-Type": "application/x-ndjson"}
    frames = [visitor.post("/traces", content=text, headers=lines).json() for _ in range(5)]
    assert [("refused" in frame) for frame in frames] == [False] * 4 + [True]
    assert "allows 4 runs per minute" in frames[-1]["refused"]
    assert "refused" not in visitor.post("/recordings", json={"name": name}).json()
    statuses = {visitor.post(f"{API}/reset", json={}).status_code for _ in range(200)}
    assert 429 in statuses and other.post(f"{API}/reset", json={}).status_code != 429


def test_recordings_are_found_by_name_only(browser: TestClient) -> None:
    for name in ("../pair", "", None, ["x"], {"x": 1}):
        assert "no recorded trace" in browser.post("/recordings", json={"name": name}).json()["refused"]


def test_requests_whose_body_does_not_arrive_are_answered_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BODY_S", 0.01)
    sent: list[Any] = []

    async def silent() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    page = Gateway(lambda *_: None, PUBLIC, None)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": f"{API}/reset", "query_string": b"", "headers": headers}
    asyncio.run(page(scope, silent, send))
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]
    assert b"did not arrive within" in sent[1]["body"]


def test_the_log_names_the_first_cause_of_a_failed_request(
    browser: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    response = browser.get(f"{API}/queue/data?session_hash=unknown-session")
    assert '"session_not_found":true' in response.text
    assert "a request failed: HTTPException\n" in caplog.text and "in sse_stream" in caplog.text
    assert "404: Not Found" not in caplog.text  # a message can quote a visitor


# --- sessions: the name of a session gives no access to its events or conversation ------------------------------------

NAME = "known-session"
ADDRESS = ("192.0.2.1", 1)


LIMITS = replace(PUBLIC, per_minute=None, at_once=None, max_seconds=0.05)


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "PROMPTS_PER_KIND", 1)  # some variants of events are valid and start a preflight
        with page_application(LIMITS) as (page, app), visitor_of(app, raise_server_exceptions=False) as client:
            client.get(f"{API}/startup-events")
            client.page = page
            client.forgetful = next(
                n for n, event in page.blocks.fns.items() if event.name == "end_conversation" and event.queue
            )
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
    assert app.page.health._service.runs.latest(session).id == run_id


def test_the_page_sets_a_secret_cookie_once(app: Any) -> None:
    client = visitor_of(app.app, client=ADDRESS)
    assert "set-cookie" not in client.get("/lessons/", follow_redirects=False).headers  # of another folder
    cookies = [client.get(path).headers.get("set-cookie") for path in ("/config", "/config", "/robots.txt")]
    assert cookies[0].startswith(f"{COOKIE}=") and "HttpOnly" in cookies[0] and "SameSite=Lax" in cookies[0]
    assert "path" not in cookies[0].lower()  # it belongs to the folder of the page
    assert cookies[1:] == [None, None] and len(client.cookies[COOKIE]) == 32
    assert visitor_of(app.app).get("/robots.txt").headers.get("set-cookie") is None


def test_short_names_and_other_values_are_refused(app: Any) -> None:
    client = visitor(app)
    for name in ("short", "", "x" * 65, "a b c d e f", 12345678, ["session-of-a-visitor"], None):
        assert join(client, app.forgetful, name).status_code == 400
        if isinstance(name, str):
            assert client.get(f"{API}/queue/data", params={"session_hash": name}).status_code == 400
        if name is not None:
            cancelled = client.post(f"{API}/cancel", json={"session_hash": name, "fn_index": 0, "event_id": "x"})
            assert cancelled.is_client_error


def request(path: str = "/", query: bytes = b"", cookie: str = "", scheme: str = "http") -> dict[str, Any]:
    headers = [(b"cookie", f"{COOKIE}={cookie}".encode())] if cookie else []
    scope = {"type": "http", "path": path, "query_string": query, "headers": headers}
    return scope | {"client": ADDRESS, "scheme": scheme}


def test_names_are_replaced_alike_in_every_part_of_a_request() -> None:
    cookie = "c" * 32
    body = hide_in_body(request(cookie=cookie), {"session_hash": NAME, "data": [NAME]})
    hidden = body["session_hash"]
    assert NAME not in hidden and body["data"] == [NAME] and len(hidden) == 64
    query = request(query=f"x={NAME}&session_hash={NAME}".encode(), cookie=cookie)
    hide_in_address(query)
    assert query["query_string"] == f"x={NAME}&session_hash={hidden}".encode()
    for other in ("d" * 32, "", "short"):
        assert hide_in_body(request(cookie=other), {"session_hash": NAME})["session_hash"] != hidden


def test_an_idle_page_keeps_no_connection_and_ends_its_session_when_it_is_closed(app: Any) -> None:
    """A browser opens six connections to a host: heartbeats of six tabs would occupy all of them."""
    client = visitor(app)
    assert client.get("/config").json()["connect_heartbeat"] is False
    assert client.post("/sessions", json={"session_hash": NAME}).status_code == 204


def test_cookies_of_frames_of_other_sites_need_encryption() -> None:
    assert new_cookie(request(), framed=True).endswith("; Secure; SameSite=None; Partitioned")
    assert new_cookie(request(scheme="https"), framed=False).endswith("; SameSite=Lax; Secure")
    assert "Secure" not in new_cookie(request(), framed=False)
    assert new_cookie(request(cookie="c" * 32), framed=False) is None
    assert new_cookie(request(cookie="short"), framed=False)


# --- events and runs with missing, surplus, wrong and huge values: a sentence, and no text of visitors in logs --------

SECRET = "zebra-in-a-prompt"
SESSION = "session-of-all-events"  # Gradio copies every component for a new session
WRONG: list[Any] = [None, SECRET, [SECRET, [SECRET]], {SECRET: SECRET}, 1e308, True, SECRET * 1000]
EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])


def send_event(app: Any, number: int, data: Any) -> tuple[int, str]:
    """Send an event; return the status and the result."""
    event = app.page.blocks.fns[number]
    route = "queue/join" if event.queue else f"run/{event.api_name}"
    response = app.post(f"{API}/{route}", json={"data": data, "fn_index": number, "session_hash": SESSION})
    if response.status_code == 200 and event.queue:
        response = app.get(f"{API}/queue/data?session_hash={SESSION}")
    return response.status_code, response.text


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
def test_every_event_answers_arbitrary_values_without_logging_them(app: Any, logged: Any, every: bool) -> None:
    blocks, problems = app.page.blocks, []
    for number, event in blocks.fns.items():
        defaults = [getattr(block, "value", None) for block in event.inputs]
        values = WRONG if every else [WRONG[number % len(WRONG)]]
        for data in variants(json.loads(json.dumps(defaults, default=str)), values):
            status, text = send_event(app, number, data)
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
    app: Any, logged: Any, path: str, body: Any, status: int
) -> None:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    headers = {"content-type": "application/json"}
    response = app.post(f"{API}/{path}", content=content, headers=headers)
    assert response.status_code == status and "detail" in response.json() and SECRET not in logged()


def test_files_and_other_types_of_bodies_are_refused(app: Any) -> None:
    events = app.page.blocks.fns.items()
    one = next(number for number, event in events if event.fn and event.queue and len(event.inputs) == 1)
    file = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    for value in (file, [[file]], {"x": file}):
        assert send_event(app, one, [value]) == (400, '{"detail":"files are not accepted: reload the page"}')
    for value in ([0] * 500_000, json.loads("[" * 500 + "]" * 500)):
        status, text = send_event(app, one, [value])
        assert status == 200 and "process_completed" in text
    sent = {"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}}
    assert app.post(f"{API}/queue/join", **sent).status_code == 415


@EVERY
def test_a_run_with_arbitrary_values_gets_a_sentence(app: Any, logged: Any, every: bool) -> None:
    valid = {"session_hash": "session-of-a-test", "settings": {}, "lanes": [], "turn": "new"}
    bodies = [valid | {name: wrong} for name in ("id", *valid) for wrong in WRONG]
    settings = ("prompt", "compare", "pair", "method", "gamma", "temperature", "gates", "seed", "drafter")
    for first, setting in enumerate(settings):
        values = WRONG if every else WRONG[first % 3 :: 3]
        bodies += [valid | {"settings": {setting: wrong}} for wrong in values]
    bodies += [valid | {"lanes": [wrong]} for wrong in WRONG]
    for number, body in enumerate(bodies):
        response = app.post("/runs", json={"id": f"run-of-a-test-{every}-{number:06}", **body})
        answer = response.json()
        words = answer["phase"][0] if response.status_code == 200 else answer["detail"]
        assert response.status_code in (200, 400, 422) and words and SECRET not in logged(), body
    json_type = {"content-type": "application/json"}
    response = app.post("/runs", content="[" * 100_000, headers=json_type)
    assert response.status_code == 400 and "not JSON" in response.json()["detail"]
