"""Hosting: sessions, health and limits of the page, the page as an app, the desktop window."""

import ast
import io
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import gradio_client
import httpx
import pytest
from fakes.traces import end, events_of, header, step
from PIL import Image

from benchmarks.load import frames_of_run
from e2e.page_fixtures import CODE, PATIENCE, Scripts, launched
from specdemo.core.events import Event
from specdemo.generate import generate
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import ASSETS
from specdemo.recipe import Recipe
from specdemo.ui import desktop_window as window
from specdemo.ui.limits import PUBLIC, HostLimits
from specdemo.ui.theme import SESSION_CAPACITY

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(served: Any, scripts: Scripts) -> Any:
    """The served page, without a recent token."""
    scripts.reset()
    jobs = served.health.jobs
    assert jobs.probe is None or jobs.probe.wait(PATIENCE)
    jobs.patience_s, served.health._service.last_token = PATIENCE, -math.inf
    return served


def test_gradio_keeps_a_bounded_number_of_sessions(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session copies all components."""
    holder = page.blocks.app.state_holder
    assert holder.capacity == SESSION_CAPACITY
    monkeypatch.setattr(holder, "session_data", OrderedDict())  # others keep their sessions
    monkeypatch.setattr(holder, "capacity", 3)
    for i in range(5):
        holder[f"session {i}"]
        holder.update(f"session {i}")
    assert [*holder.session_data] == [f"session {i}" for i in range(2, 5)]


def test_health_requires_a_recent_token(page: Any, scripts: Scripts) -> None:
    runs = []

    def counted(recipe: Recipe, *asked: Any) -> Iterator[Event]:
        runs.append((recipe.method, recipe.max_tokens))
        yield from generate(recipe, *asked)

    scripts.engine = counted
    first, second = (httpx.get(f"{page.url}health", timeout=PATIENCE) for _ in range(2))
    assert first.status_code == second.status_code == 200
    assert "a probe produced a token" in first.json()["why"] and "s ago" in second.json()["why"]
    assert runs == [("ar", 2)]  # the first check needed a probe, the second did not


def test_hanging_device_is_unhealthy(page: Any, scripts: Scripts) -> None:
    gate, tries = threading.Event(), []

    def hung(*_: Any) -> Iterator[Event]:
        tries.append(1)
        assert gate.wait(PATIENCE)
        yield from events_of([step(0, pieces=["a"])])

    scripts.engine, page.health.jobs.patience_s = hung, 0.2
    for _ in range(2):
        said = httpx.get(f"{page.url}health", timeout=PATIENCE)
        assert said.status_code == 503 and "the device does not respond" in said.json()["why"]
    assert httpx.get(f"{page.url}config", timeout=PATIENCE).status_code == 200
    assert len(tries) == 1 and page.worker.active == 1  # looking again makes no queue
    gate.set()
    page.health.jobs.patience_s = PATIENCE
    assert httpx.get(f"{page.url}health", timeout=PATIENCE).status_code == 200


def test_the_page_can_be_installed_as_an_app(page: Any) -> None:
    manifest = httpx.get(f"{page.url}manifest.json", timeout=PATIENCE).json()
    assert '<link rel="manifest" href="manifest.json"' in httpx.get(page.url, timeout=PATIENCE).text
    assert manifest["name"] == "specdemo" and manifest["display"] == "standalone"
    sizes = {}
    for icon in manifest["icons"]:
        image = Image.open(io.BytesIO(httpx.get(page.url + icon["src"], timeout=PATIENCE).content))
        sizes[icon["sizes"]] = image.size
        assert image.convert("RGB").getpixel((image.width // 3, image.height // 4)) == (0x7B, 0xD8, 0x8F)  # ours
    assert sizes == {"192x192": (192, 192), "512x512": (512, 512)}
    assert httpx.get(f"{page.url}favicon.ico", timeout=PATIENCE).content == (ASSETS / "icon.png").read_bytes()


def test_window_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Toolkit errors end only the child process; a `webview` module first on the path replaces the toolkit."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    fake = tmp_path / "webview.py"
    for source, said in (
        ("raise ImportError", "pywebview is not installed (pip install 'pywebview[qt]' on Linux"),
        (
            "import os, sys\nprint('no display', file=sys.stderr, flush=True)\nos._exit(134)",
            "pywebview ended with code 134. no display",
        ),
        ("import os\nos._exit(7)", "pywebview ended with code 7"),
        (WEBVIEW.format(start="raise WebViewException('no QT')"), "pywebview found no window toolkit: no QT"),
    ):
        fake.write_text(source)
        assert (window.show("http://127.0.0.1:1/") or "").startswith(said)
    fake.write_text(WEBVIEW.format(start=f"open({str(tmp_path / 'shown')!r}, 'w').write(repr((made, settings, more)))"))
    assert window.show("http://127.0.0.1:1/") is None
    made, settings, more = ast.literal_eval((tmp_path / "shown").read_text())
    assert made == ["specdemo", "http://127.0.0.1:1/"]
    assert settings == {"ALLOW_DOWNLOADS": True} and more == {"private_mode": False}


WEBVIEW = """
class WebViewException(Exception): ...
settings, made = {{}}, []
def create_window(title, url, **more): made.extend((title, url))
def start(**more): {start}
"""


# --- limits, enforced over HTTP: errors for one client while others are served ----------------------------------------


class Patient:
    """Real engine, except that the prompt "endless" takes 10 ms per step until `over` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __call__(self, recipe: Recipe, prompt: str, pool: ModelPool, stores: Any) -> Iterator[Event]:
        endless = prompt == "endless"
        yield from events_of(self._endless()) if endless else generate(recipe, prompt, pool, stores)

    def _endless(self) -> Iterator[dict[str, Any]]:
        yield header(prompt="endless")
        for i in count():
            if self.over.wait(0.01):
                break
            yield step(i, pieces=["b"])
        yield end()


@pytest.fixture(scope="module")
def engine() -> Patient:
    return Patient()


@pytest.fixture(scope="module")
def limited(engine: Patient) -> Iterator[Any]:
    limits = replace(PUBLIC, max_tokens=64, max_gamma=6, max_nodes=16, max_prompt=1000, per_minute=None)
    with launched(engine=engine, limits=limits) as page:
        yield page


def client(page: Any, address: str, at_once: int = 8) -> gradio_client.Client:
    """Connect from `address`: the server trusts the header of a proxy on localhost."""
    return gradio_client.Client(
        page.url,
        verbose=False,
        max_workers=at_once,
        headers={"X-Forwarded-For": address},
        ssl_verify=False,  # reading certificates takes 20 ms per request
        analytics_enabled=False,
    )


def test_fifty_parallel_requests_do_not_block_another_visitor(limited: Any, engine: Patient) -> None:
    crowd = client(limited, "198.51.100.7", at_once=50)
    jobs = [crowd.submit("endless", api_name="/generate") for _ in range(50)]
    finished = wait([job.future for job in jobs], timeout=PATIENCE, return_when="FIRST_EXCEPTION").done
    assert finished  # the limit is reached
    lines = client(limited, "203.0.113.5").submit(CODE, max_tokens=12, api_name="/generate")
    metrics = [json.loads(line) for line in lines][-1]["metrics"]
    assert metrics["tokens"] == 12  # while the other runs are active
    assert limited.worker.active == PUBLIC.at_once
    engine.over.set()
    assert not wait([job.future for job in jobs], timeout=PATIENCE).not_done
    errors = [str(job.exception()) for job in jobs if job.exception()]
    assert len(errors) == 50 - PUBLIC.at_once
    assert all("you already have 2 runs in progress" in error for error in errors)
    engine.over.clear()


def test_time_limit_ends_a_run_and_keeps_its_text() -> None:
    with launched(engine=Patient(), limits=HostLimits(max_seconds=1)) as strict:
        lines = [json.loads(line) for line in client(strict, "203.0.113.5").submit("endless", api_name="/generate")]
        *_, last = frames_of_run(strict.url, "session-of-a-script", {"prompt": "endless"})
    assert lines[-1]["end"] == "cancelled" and lines[-1]["error"].startswith("the time limit of 1 seconds per run")
    assert lines[-1]["metrics"]["tokens"] == len(lines) - 2 > 10
    frame = json.loads(last)
    phase, why = frame["phase"]
    assert phase == "stopped" and "the time limit of 1 seconds per run" in why and frame["over"]
