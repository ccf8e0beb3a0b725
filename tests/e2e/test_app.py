"""The command that starts the page: its port and its defaults. Nothing is launched here."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

import app


@pytest.fixture
def busy() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_was_asked_for_is_that_port_or_none(busy: int) -> None:
    assert app.choose_port("127.0.0.1", busy) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    assert app.choose_port("127.0.0.1", free) == free


def test_the_usual_port_gives_way_to_the_next_free_one(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "PORT", busy)
    chosen = app.choose_port("127.0.0.1", None)
    assert chosen is not None and busy < chosen < busy + 100


def test_a_busy_port_ends_in_one_sentence_and_code_2(busy: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--port", str(busy)]) == 2
    said = capsys.readouterr().err
    assert said == f"Port {busy} on 127.0.0.1 cannot be had: choose another with --port.\n"


def test_nothing_is_shared_and_only_this_machine_is_served_unless_asked() -> None:
    args = app.options().parse_args([])
    assert args.share is False and args.host == "127.0.0.1" and args.port is None


@pytest.mark.parametrize(
    ("system", "environment", "seen"),
    [
        ("linux", {}, False),
        ("linux", {"DISPLAY": ":0"}, True),
        ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, True),
        ("linux", {"DISPLAY": ":10", "SSH_CONNECTION": "a b c d"}, False),
        ("darwin", {}, True),
        ("win32", {"CI": "true"}, False),
    ],
)
def test_a_browser_is_opened_where_it_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, system: str, environment: dict[str, str], seen: bool
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", system)
    assert app.has_display() is seen
