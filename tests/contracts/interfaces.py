"""Access to the program from outside: the terminal, the cloud service and the page.

The only file of these tests that imports specdemo; change it here when a module moves. As a script it records the
golden files again: `python tests/contracts/interfaces.py --write`.
"""

import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import HTTPError
from urllib.request import Request, urlopen

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES, TRACES = HERE / "names.json", HERE / "traces.jsonl"
OLD_TRACES = ROOT / "assets" / "traces"
TOKEN = "golden"  # of the cloud service
WAIT_S = 120.0


def limit_variables() -> list[str]:
    """Environment variables that limit visitors: the error for an unknown variable lists the valid names."""
    from specdemo.ui.limits import read_limits

    try:
        read_limits({"SPECDEMO_UNKNOWN": "1"})
    except ValueError as error:
        return listed(str(error))
    raise AssertionError("an unknown name was accepted")


def preflight(target: str, drafter: str) -> dict[str, Any]:
    """Result of the API endpoint /preflight, which accepts ready pairs only; here for a pair on disk."""
    from specdemo.models.model_pool import ModelPool
    from specdemo.preflight import preflight
    from specdemo.prompts import Prompt
    from specdemo.recipe import Recipe

    recipe = Recipe(target=target, drafter=drafter, device="cpu", top_p=1.0)
    return preflight(recipe, [Prompt("code", "one", "def f(x):\n    return x\n")], ModelPool()).as_dict()


def listed(sentence: str) -> list[str]:
    """Names at the end of a sentence."""
    sentence = re.sub(r",? (?:and|or) (?=[\w.:-]+$)", ", ", sentence.strip().rstrip("."))
    return re.search(r"[\w.:-]+(?:, [\w.:-]+)*$", sentence).group().split(", ")


def terminal(*arguments: str) -> tuple[int, str, str]:
    """Run `python -m specdemo ARGUMENTS` in this process, which saves the import of torch: exit code and output."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["specdemo", *arguments]),
        mock.patch.object(sys, "path", [str(ROOT), *sys.path]),
        mock.patch.dict(os.environ, {"COLUMNS": "200", "SPECDEMO_TOKEN": TOKEN}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_module("specdemo", run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), err.getvalue()


def script(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


class Program:
    """Server in a separate process; `url` blocks until the server prints its address."""

    def __init__(self, program: str, *arguments: str, **environment: str) -> None:
        from fakes import forked_process

        call = getattr(forked_process, program)
        self._process = forked_process.ForkedProcess(call, *arguments, errors_in_output=True, **environment)
        self._address: Future[str] = Future()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        output = ""
        for line in self._process.stdout:
            output += line
            if not self._address.done() and (address := re.search(r"https?://[^\s/]+", line)):
                self._address.set_result(address.group())
        if not self._address.done():
            self._address.set_exception(AssertionError(output))

    @property
    def url(self) -> str:
        """Address, without a final slash."""
        return self._address.result(WAIT_S)

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """Status and text of one HTTP request; a body that is not text is sent as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", **{name.replace("_", "-"): v for name, v in headers.items()}}
        try:
            with urlopen(Request(self.url + path, data, headers, method=method), timeout=WAIT_S) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()


class Service(Program):
    """`python -m specdemo serve`."""

    def __init__(self, target: str) -> None:
        limits = ("--rate", "20", "--body-mb", "0.1")
        where = ("--target", target, "--device", "cpu", "--port", "0")
        super().__init__("terminal", "serve", *where, *limits, SPECDEMO_TOKEN=TOKEN)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        return self.request(method, path, body, **{"authorization": f"Bearer {TOKEN}", **headers})


class Page(Program):
    """`python app.py`."""

    def __init__(self) -> None:
        from fakes.http_server import free_port

        super().__init__("page", "--pair", "bundled", "--port", str(free_port()), "--no-browser")

    def json(self, path: str) -> Any:
        return json.loads(self.request("GET", path)[1])

    def scripts(self, loader: str) -> list[str]:
        """Texts of the JavaScript modules that a component loads."""
        responses = [self.request("GET", f"/{path}") for path in re.findall(r'"(cockpit/[\w/]+\.js)"', loader)]
        assert all(status == 200 for status, _ in responses)
        return [text for _, text in responses]

    def open_trace(self, text: str) -> dict[str, Any]:
        status, frame = self.request("POST", "/traces", text.encode(), content_type="application/x-ndjson")
        assert status == 200, frame
        opened: dict[str, Any] = json.loads(frame)
        return opened

    def recordings(self) -> list[str]:
        (cockpit,) = (one for one in self.json("/config")["components"] if one["props"].get("elem_id") == "cockpit")
        return cockpit["props"]["props"]["recordings"]


@contextlib.contextmanager
def started() -> Iterator[tuple[tuple[str, str], Service, Page]]:
    """Directories of a target and a drafter, the cloud service of that target, and the page."""
    from .models import save_pair

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        page = opened.enter_context(contextlib.closing(Page()))
        models = save_pair(Path(folder))
        service = opened.enter_context(contextlib.closing(Service(models[0])))
        yield models, service, page


def write() -> None:
    from . import names, traces

    with started() as (models, service, page):
        TRACES.write_text(traces.record_all(models), encoding="utf-8")
        found = {name: section(models, service, page) for name, section in names.SECTIONS.items()}
        NAMES.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/contracts/interfaces.py --write")
    sys.path[:0] = [str(ROOT), str(HERE.parent)]
    import_module("contracts.interfaces").write()
