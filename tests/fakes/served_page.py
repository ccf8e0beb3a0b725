"""The page as an application, without a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr
from starlette.testclient import TestClient

from specdemo.ui.limits import HostLimits
from specdemo.ui.page import Page, build
from specdemo.ui.theme import launch_options

ADDRESS = "http://127.0.0.1:7860"


@contextmanager
def page_application(limits: HostLimits) -> Iterator[tuple[Page, Any]]:
    """Yield the page and its application."""
    page = build(limits=limits)
    options = launch_options(page.routes, page.middleware)
    page.blocks.favicon_path, page.blocks.pwa = options["favicon_path"], True
    yield page, gr.routes.App.create_app(page.blocks, app_kwargs=options["app_kwargs"])
    page.worker.close()


def visitor_of(app: Any, **options: Any) -> TestClient:
    return TestClient(app, base_url=ADDRESS, **options)


def last_frame(client: TestClient, request: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Start a run; return the frame of its end."""
    response = client.post("/runs", json=request, **options)
    assert response.status_code == 200, response.text
    with client.websocket_connect(f"/frames/{request['id']}") as socket:
        while not (frame := socket.receive_json())["over"]:
            pass
    return frame
