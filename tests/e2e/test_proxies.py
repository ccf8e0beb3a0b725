"""The page below a path of a proxy, and in frames of other sites."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fakes.http_server import Handler, http_server
from fakes.relay import Proxy, proxied
from playwright.sync_api import BrowserContext, expect

from e2e.limited_page import launched
from e2e.page_fixtures import CODE, PATIENCE, RETURNING, Scripts, complete, run, spans, stop, tabs
from specdemo.ui.gateway import COOKIE
from specdemo.ui.limits import HostLimits

pytestmark = [pytest.mark.slow, pytest.mark.browser]

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
