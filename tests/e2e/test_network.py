"""Requests of the page that fail, the page below a path of a proxy, and in frames of other sites."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fakes.http_server import Handler, http_server
from fakes.relay import Proxy, proxied
from playwright.sync_api import BrowserContext, Page, Route, expect

from e2e.page_fixtures import (
    CODE,
    PATIENCE,
    RETURNING,
    Scripts,
    complete,
    counted,
    drawn,
    expect_for_a_moment,
    lane_action,
    launched,
    quick,
    record_phases,
    run,
    saved,
    spans,
    status,
    stop,
    tabs,
)
from specdemo.ui import runs
from specdemo.ui.gateway import COOKIE
from specdemo.ui.limits import HostLimits

pytestmark = [pytest.mark.slow, pytest.mark.browser]

FRAMES = "**/frames/*"


def refused(route: Route) -> None:
    route.fulfill(status=429, json={"detail": "too many requests"})


def aborted(route: Route) -> None:
    route.abort()


@pytest.fixture(scope="module")
def quick_tab(served: Any, chromium: BrowserContext, errors: list[str]) -> Iterator[Page]:
    with tabs(served, chromium, errors) as open_tab:
        yield open_tab(quick(4))


@pytest.fixture
def quick_page(quick_tab: Page, scripts: Scripts) -> Page:
    """Tab of this file that sends and repeats requests after a quarter of the time."""
    scripts.reset()
    return quick_tab


def test_a_rejected_run_ends_without_a_headline_and_one_that_began_is_shown(quick_page: Page) -> None:
    """Also after an earlier run; the server has begun the last run before its answer is lost."""
    page = quick_page
    button, headline = page.locator("#run"), page.locator("#headline")
    answers = {
        "failed: too many requests": refused,
        "failed: a proxy": lambda route: route.fulfill(status=405, body="<h1>Not allowed</h1>"),
    }
    for cause, answer in answers.items():
        page.route("**/runs", answer)
        run(page, CODE)
        status(page, cause)
        expect(button).to_have_attribute("aria-disabled", "false")
        expect(headline).to_be_empty()
        page.unroute("**/runs")
        complete(page, CODE, tokens=8)
        expect(headline).not_to_be_empty()

    def begun(route: Route) -> None:
        route.fetch()
        route.fulfill(status=502, json={"detail": "bad gateway"})

    page.route("**/runs", begun)
    complete(page, CODE, tokens=9)
    page.unroute("**/runs")
    assert drawn(page) == counted(saved(page))


def passed(page: Page, phase: str) -> None:
    """Wait until the page has been in a phase since `record_phases`."""
    page.wait_for_function("phase => window.phases.includes(phase)", arg=phase)


def test_a_run_survives_failed_requests_for_frames(quick_page: Page, scripts: Scripts) -> None:
    page = quick_page
    scripts.held_after = 4
    record_phases(page)
    with page.expect_request(FRAMES):  # after a while without frames
        for failure in (aborted, refused):
            page.route(FRAMES, failure, times=1)
        run(page, CODE, tokens=48)
    passed(page, "reconnecting")
    scripts.gate.set()
    status(page, "done: 48 tokens")
    page.unroute(FRAMES)
    assert drawn(page) == counted(saved(page))


def test_a_run_that_the_server_dropped_fails(quick_page: Page, scripts: Scripts) -> None:
    page = quick_page
    scripts.held_after = 4
    run(page, CODE, tokens=48)
    spans(page, 1)
    page.route(FRAMES, lambda route: route.fulfill(status=404, json={"detail": "unknown"}), times=1)
    status(page, "failed: the server no longer stores this run")
    scripts.gate.set()


LOST = """window.WebSocket = class { constructor() { setTimeout(() => this.onclose(), 9); } close() {} };
    AbortSignal.timeout = () => {
        const controller = new AbortController();
        setTimeout(() => controller.abort(), 1000);
        return controller.signal;
    };"""


def test_a_lost_connection_ends_the_display_although_no_request_fails(tab: Any, scripts: Scripts) -> None:
    page = tab(LOST + quick(20))
    page.route(FRAMES, lambda route: None)
    run(page, "endless")
    status(page, "failed: the server is not reachable")


def test_a_trace_that_does_not_open_leaves_the_run_that_began_meanwhile(quick_page: Page, tmp_path: Path) -> None:
    page, held = quick_page, []
    page.route("**/recordings", lambda route: held.append(route))
    with page.expect_request("**/recordings"):
        page.locator("#recorded button").first.click()
    run(page, "endless")
    spans(page, 3)
    held[0].abort()
    path = tmp_path / "large.jsonl"
    path.write_bytes(b"x" * 33_000_000)
    page.locator("#trace-file").set_input_files(path)
    spans(page, page.locator("#lane-spec .tok").count() + 3)
    stop(page)
    page.unroute("**/recordings")


# A resumed run can begin before the button is mounted.
LATE_BUTTON = """
    const find = document.getElementById.bind(document);
    document.getElementById = (id) => (id === "stop" && document.body.dataset.shown !== "yes" ? null : find(id));
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("", id="socket"),
        pytest.param(
            "window.WebSocket = class { constructor() { setTimeout(() => this.onclose(), 9); } close() {} };",
            id="requests",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_run_resumes_after_an_interruption_and_is_cancelled_by_a_reload(
    quick_page: Page, tab: Any, scripts: Scripts, served: Any, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """The run continues meanwhile; a reload by a program resumes it, one by the visitor stops it."""
    page, frames = tab(script + quick(4)) if script else quick_page, []
    page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: frames.append(frame)))
    scripts.step_s = 0.1
    run(page, "endless")
    for _ in range(4):  # each wait needs another frame
        spans(page, page.locator("#lane-spec .tok").count() + 1)
    assert bool(frames) == (not script)
    if script:
        expect(page.locator("#status")).to_contain_text("no WebSocket could be opened")
    record_phases(page)
    page.route(FRAMES, aborted, times=2)
    for protocol in list(served.blocks.server.server_state.connections):
        protocol.loop.call_soon_threadsafe(protocol.transport.abort)
    passed(page, "reconnecting")
    status(page, "decoding")
    spans(page, 3 * scripts.steps)
    page.add_init_script(LATE_BUTTON)
    with page.expect_event("load"):
        page.evaluate("location.reload()")  # as Gradio does after an interruption of its events
    status(page, "decoding")
    spans(page, 3 * scripts.steps)
    stop(page)
    assert scripts.closed.wait(PATIENCE) and drawn(page) == counted(saved(page))
    if not script:
        monkeypatch.setattr(runs, "GRACE_S", float("inf"))  # the server alone does not end a run
        is_cancelled_by_a_reload_of_the_visitor(page, scripts)


def is_cancelled_by_a_reload_of_the_visitor(page: Page, scripts: Scripts) -> None:
    for shown in (True, False):  # before the first frame, too
        scripts.reset()
        if not shown:
            page.route("**/runs", lambda route: route.fetch())  # the response is lost
        run(page, "endless")
        if shown:
            spans(page, 10)
        assert scripts.inside.wait(PATIENCE)
        page.reload()
        assert scripts.closed.wait(PATIENCE) and scripts.closed_in == "device"
        expect(page.locator("#status")).to_have_text("ready")
    page.unroute("**/runs")


@pytest.mark.parametrize("pace", ["instant", "readable"])
def test_stop_can_be_repeated_after_a_failed_request(page: Page, pace: str) -> None:
    page.locator("#pace").select_option(pace)
    run(page, "endless")
    spans(page, 10)
    page.route(FRAMES, lambda route: aborted(route) if route.request.method == "POST" else route.continue_())
    with page.expect_request(lambda request: request.method == "POST" and "/frames/" in request.url):
        page.locator("#stop").click()
    expect(page.locator("[data-stopping]")).to_have_attribute("data-stopping", "no")
    page.unroute(FRAMES)
    spans(page, page.locator("#lane-spec .tok").count() + 1)
    stop(page)


def test_failed_exports_can_be_repeated(page: Page) -> None:
    complete(page, CODE, tokens=8)
    for button, request in (
        (lane_action(page, "trace"), "**/traces/*/*"),
        (page.locator("#save-page"), "**/saved_page.html"),
    ):
        with page.expect_request(request):
            page.route(request, aborted, times=1)
            button.click()
        status(page, "failed: the request failed: try again")
        page.evaluate("document.getElementById('status').textContent = ''")
    assert counted(saved(page)) == drawn(page)
    with page.expect_download():
        page.locator("#save-page").click()


def test_copying_without_a_clipboard_is_reported(page: Page) -> None:
    """Browsers have no clipboard over plain HTTP."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    complete(page, CODE, tokens=8)
    lane_action(page, "copy").click()
    expect_for_a_moment(page, "#copy-spec", "Not permitted")
    page.evaluate("delete navigator.clipboard")


REFUSED = """for (const name of ["localStorage", "sessionStorage"])
    Object.defineProperty(window, name, {get() { throw new DOMException("refused", "SecurityError"); }});"""


def test_a_page_whose_browser_refuses_storage_works(tab: Any) -> None:
    page = tab(REFUSED)
    complete(page, CODE, tokens=8)
    page.locator("#keep-lane").click()
    expect(page.locator("#kept-lanes")).to_contain_text("Also compared")
    page.locator("#inline-guesses").click()
    expect(page.locator("#inline-guesses")).to_be_checked()


SERVED, ROOTED = "served", "rooted"  # fixtures: pages without and with GRADIO_ROOT_PATH
SET_UPS = {
    "path removed, nothing set": (SERVED, Proxy(passes_host=False)),
    "path removed, headers": (SERVED, Proxy(passes_host=False, forwards=True)),
    "path removed, root set": (ROOTED, Proxy()),
    "path removed, root set, no host": (ROOTED, Proxy(passes_host=False)),
    "path kept, root set": (ROOTED, Proxy(strips=False)),
    "path kept, root set, no host": (ROOTED, Proxy(strips=False, passes_host=False)),
}
REPRESENTATIVE = "path kept, root set"


class Course(Handler):
    """Pages of other sites."""

    def do_GET(self) -> None:
        self.answer(200, b"{}")


@pytest.fixture(scope="module")
def course() -> Iterator[str]:
    """Port of pages, which are another site than 127.0.0.1 under the name localhost."""
    with http_server(Course) as url:
        yield url.rpartition(":")[2]


@pytest.fixture(scope="module")
def rooted(scripts: Scripts, course: str) -> Iterator[Any]:
    """Page that knows its path and may be framed."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GRADIO_ROOT_PATH", "/demo")
        limits = HostLimits(frames=(f"http://localhost:{course}",))
        with launched(engine=scripts, limits=limits, compare=False) as page:
            environment.undo()
            yield page


@pytest.mark.parametrize(
    ("fixture", "proxy"),
    [
        pytest.param(*values, id=name, marks=[] if name == REPRESENTATIVE else [pytest.mark.exhaustive])
        for name, values in SET_UPS.items()
    ],
)
def test_page_lessons_and_documents_stay_below_the_path_of_a_proxy(
    request: pytest.FixtureRequest,
    scripts: Scripts,
    chromium: BrowserContext,
    errors: list[str],
    fixture: str,
    proxy: Proxy,
) -> None:
    """At the end `tabs` checks that no request left the path."""
    scripts.reset()
    served = request.getfixturevalue(fixture)
    with proxied(served.url, proxy) as root, tabs(SimpleNamespace(url=root), chromium, errors) as open_tab:
        page = open_tab()
        frames: list[str] = []  # addresses of the sockets that delivered them
        page.on("websocket", lambda socket: socket.on("framereceived", lambda _: frames.append(socket.url)))
        run(page, "endless")
        spans(page, 3)
        stop(page)
        complete(page, CODE, tokens=8)
        assert bool(frames) == proxy.passes_host  # otherwise requested, as after an interruption
        assert all(address.startswith(f"ws{root.removeprefix('http')}frames/") for address in frames)
        with page.expect_download():
            page.locator("#save-page").click()
        document = page.locator("#page-links a", has_text="Documentation").evaluate("link => link.href")
        with page.expect_popup() as opened:
            page.locator("#page-links a", has_text="Lessons").click()
        assert opened.value.url == f"{root}lessons"
        expect(opened.value.locator("#lesson-curve svg")).to_be_attached()
        opened.value.close()
        page.goto(document)
        expect(page.locator("h1").first).to_be_visible()
        assert page.locator("nav > a").evaluate("link => link.href") == root


def test_a_path_that_no_one_removes_is_explained(served: Any) -> None:
    with proxied(served.url, Proxy(strips=False)) as root:
        response = httpx.get(root, timeout=PATIENCE)
    assert response.status_code == 404 and "set GRADIO_ROOT_PATH" in response.json()["detail"]


FRAMED = """url => {
    const frame = document.createElement("iframe");
    document.body.append(Object.assign(frame, { src: url, width: 1200, height: 800 }));
}"""


def test_only_listed_sites_frame_the_page_and_it_works_there(
    rooted: Any, course: str, scripts: Scripts, chromium: BrowserContext
) -> None:
    """The final slash of the path may be missing."""
    scripts.reset()
    page = chromium.new_page()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.set_default_timeout(PATIENCE * 1000)
    page.add_init_script(RETURNING)
    page.goto(f"http://other.localhost:{course}")
    with page.expect_console_message(lambda message: "frame-ancestors" in message.text):
        page.evaluate(FRAMED, rooted.url)
    page.goto(f"http://localhost:{course}")
    requested.clear()
    page.evaluate(FRAMED, f"{rooted.url}demo")
    page.frame_locator("iframe").locator("#lane-spec").wait_for()
    frame = next(frame for frame in page.frames if frame.url.startswith(rooted.url))
    expect(frame.locator("body")).to_have_attribute("data-settings", "restored")
    with page.expect_request("**/demo/runs") as request:
        complete(frame, CODE, tokens=8)
    assert f"{COOKIE}=" in request.value.all_headers()["cookie"]
    assert requested and not [url for url in requested if not url.startswith((f"{rooted.url}demo", "data:", "blob:"))]
    page.close()
