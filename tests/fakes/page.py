"""The page as an application, without a server, and the fields and figures in its markup."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import gradio as gr
from starlette.testclient import TestClient

from specdemo.ui.limits import HostLimits
from specdemo.ui.page import Page, build
from specdemo.ui.theme import launch_options

ADDRESS = "http://127.0.0.1:7860"


@contextmanager
def page_application(limits: HostLimits) -> Iterator[tuple[Page, Any]]:
    page = build(limits=limits)
    options = launch_options(page.routes, page.middleware)
    page.blocks.favicon_path, page.blocks.pwa = options["favicon_path"], True
    yield page, gr.routes.App.create_app(page.blocks, app_kwargs=options["app_kwargs"])
    page.worker.close()


def visitor_of(app: Any, **options: Any) -> TestClient:
    return TestClient(app, base_url=ADDRESS, **options)


def last_frame(client: TestClient, request: dict[str, Any], **options: Any) -> dict[str, Any]:
    response = client.post("/runs", json=request, **options)
    assert response.status_code == 200, response.text
    with client.websocket_connect(f"/frames/{request['id']}") as socket:
        while not (frame := socket.receive_json())["over"]:
            pass
    return frame


@dataclass
class Field:
    """Attributes of a field, with the titles of its choices by name."""

    attributes: dict[str, str | None]
    choices: dict[str, str] = field(default_factory=dict)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Field] = {}
        self._field = Field({})
        self._choice: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if name := attributes.get("data-setting"):
            self._field = self.fields[name] = Field(attributes)
        elif tag == "option" or (tag == "input" and attributes.get("type") == "checkbox"):
            self._choice = attributes.get("value")

    def handle_data(self, data: str) -> None:
        if self._choice is not None:
            self._field.choices[self._choice] = data
            self._choice = None


def form_markup(blocks: Any) -> str:
    (markup,) = (part.value for part in blocks.blocks.values() if part.elem_id == "settings-fields")
    return markup


def form_fields(blocks: Any) -> dict[str, Field]:
    reader = _Reader()
    reader.feed(form_markup(blocks))
    return reader.fields


def figure_of(markup: str) -> dict[str, Any]:
    """Return the figure of the only element in `markup`; JavaScript would refuse infinite numbers."""
    elements: list[dict[str, str | None]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: elements.append(dict(attributes))  # type: ignore[method-assign]
    parser.feed(markup)
    (attributes,) = elements
    figure: dict[str, Any] = json.loads(attributes["figure"] or "", parse_constant=_refuse)
    return figure


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def values(markup: str, label: str) -> dict[float, float]:
    (series,) = [series for series in figure_of(markup)["series"] if series["label"] == label]
    return dict(series["points"])
