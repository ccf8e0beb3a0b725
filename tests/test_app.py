"""Options of app.py: port selection and defaults. No page is launched."""

import socket
from collections.abc import Iterator

import pytest

import app
from specdemo.core.errors import UserError


@pytest.fixture
def busy() -> Iterator[int]:
    """Port in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_requested_port_is_used_or_unavailable(busy: int) -> None:
    assert app.choose_port("127.0.0.1", busy) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    assert app.choose_port("127.0.0.1", free) == free


def test_the_default_port_falls_back_to_the_next_free_port(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "PORT", busy)
    chosen = app.choose_port("127.0.0.1", None)
    assert chosen is not None and busy < chosen < busy + 100


def test_a_busy_port_gives_an_error_and_exit_code_2(busy: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--port", str(busy)]) == 2
    error = capsys.readouterr().err
    assert error == f"Port {busy} on 127.0.0.1 is unavailable: choose another port with --port.\n"


def test_address_of_a_space_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default only this machine is served."""
    args = app.options().parse_args([])
    assert (args.host, args.share) == ("127.0.0.1", False)
    monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
    monkeypatch.setenv("GRADIO_SERVER_PORT", "7860")
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    args = app.options().parse_args([])
    assert (args.host, args.port, args.zero_gpu) == ("0.0.0.0", 7860, True)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SPECDEMO_MAX_TOKENS", "lots", "SPECDEMO_MAX_TOKENS must be a whole number"),
        ("SPECDEMO_PAIR", "bundled", "unknown variable 'SPECDEMO_PAIR'"),
    ],
)
def test_invalid_host_settings_end_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    assert app.main(["--no-browser"]) == 2
    assert capsys.readouterr().err.startswith(said)


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
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert app.main(["--port", str(port), "--no-browser"]) == 2
    assert capsys.readouterr().err == "no temporary folder is writable: set TMPDIR to a writable directory\n"
