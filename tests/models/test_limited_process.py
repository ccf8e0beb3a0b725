"""Limits of processes for inputs that may contain hostile programs."""

import json
import subprocess
import sys
import threading

import pytest

from specdemo.core.errors import UserError
from specdemo.models.limited_process import LimitedProcess

resource = pytest.importorskip("resource")
SERVER = """
import resource
from specdemo.models.limited_process import serve
resource.setrlimit(resource.RLIMIT_{kind}, ({hard}, {hard}))
serve(lambda request: resource.getrlimit(resource.RLIMIT_{kind})[1], 50, 32 << 30)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set on Linux")
@pytest.mark.parametrize(
    ("kind", "hard", "expected"), [("AS", 4 << 30, 4 << 30), ("AS", -1, 32 << 30), ("CPU", 20, 20), ("CPU", 80, 50)]
)
def test_a_stricter_limit_of_the_program_remains(kind: str, hard: int, expected: int) -> None:
    server = [sys.executable, "-c", SERVER.format(kind=kind, hard=hard)]
    answers = subprocess.run(server, input="null\nnull\n", capture_output=True, text=True, check=True).stdout
    assert [json.loads(line) for line in answers.splitlines()] == [{"value": expected}] * 2


def test_a_process_ended_late_is_not_used_again() -> None:
    process, others = LimitedProcess("specdemo.models.chat_template"), {*threading.enumerate()}
    for _ in range(3):
        with pytest.raises(UserError, match="takes more than 0 s"):
            process.request(["a", {}], 0.0, "it", "wait")
        assert not any(isinstance(thread, threading.Timer) for thread in {*threading.enumerate()} - others)
    process.close()
