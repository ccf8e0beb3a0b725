"""Hosting: sessions and health of the page, the page as an app, the desktop window."""

import ast
import io
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.traces import events_of, step
from PIL import Image

from e2e.page_fixtures import PATIENCE, Scripts
from specdemo.core.events import Event
from specdemo.generate import generate
from specdemo.models.zoo import ASSETS
from specdemo.recipe import Recipe
from specdemo.ui import desktop_window as window
from specdemo.ui.theme import SESSION_CAPACITY

pytestmark = pytest.mark.slow

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
