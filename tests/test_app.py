"""Options of app.py: port selection and defaults. No page is launched."""

import socket
from collections.abc import Iterator

import pytest
from fakes.http_server import free_port

import app
from specdemo.core.errors import UserError


@pytest.fixture
def busy() -> Iterator[int]:
    """Port in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_is_replaced_by_the_next_one_unless_it_was_requested(
    busy: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "PORT", busy)
    chosen = app.choose_port("127.0.0.1", None)
    assert chosen is not None and busy < chosen < busy + 100
    assert app.choose_port("127.0.0.1", free_port()) is not None
    assert app.main(["--port", str(busy)]) == 2
    assert capsys.readouterr().err == f"Port {busy} on 127.0.0.1 is unavailable: choose another port with --port.\n"


def test_address_of_a_space_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default only this machine is served."""
    args = app.options().parse_args([])
    assert (args.host, args.share) == ("127.0.0.1", False)
    monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
    monkeypatch.setenv("GRADIO_SERVER_PORT", "7860")
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    args = app.options().parse_args([])
    assert (args.host, args.port, args.zero_gpu) == ("0.0.0.0", 7860, True)


def test_invalid_host_settings_end_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEMO_MAX_TOKENS", "lots")
    assert app.main(["--no-browser"]) == 2
    assert capsys.readouterr().err.startswith("SPECDEMO_MAX_TOKENS must be a whole number")


@pytest.mark.parametrize(
    ("flags", "public", "lines"),
    [
        ("", False, 0),
        ("--host localhost", False, 0),
        ("--host 0.0.0.0", False, 1),
        ("--share", False, 1),
        ("--host 0.0.0.0 --share", True, 0),
    ],
)
def test_a_private_page_that_is_open_to_the_network_gives_a_warning(
    flags: str, public: bool, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEMO_PUBLIC", str(int(public)))
    args = app.options().parse_args([*flags.split(), "--pair", "no such pair"])
    with pytest.raises(UserError, match="no such pair"):
        app._build(args)
    warning = capsys.readouterr().err
    assert warning.count("SPECDEMO_PUBLIC=1") == warning.count("\n") == lines


def test_a_read_only_machine_gives_an_error_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> str:
        raise FileNotFoundError("No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", missing)
    assert app.main(["--port", str(free_port()), "--no-browser"]) == 2
    assert capsys.readouterr().err == "no temporary folder is writable: set TMPDIR to a writable directory\n"
