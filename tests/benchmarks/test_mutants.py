"""Processes of mutation tests: outcomes, time limits, order of the tests, selected functions of C files."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from benchmarks import mutants, native_mutants
from benchmarks.forked_tests import KILLED, SURVIVED, TIMEOUT, exit_code, forked
from benchmarks.native_mutants import lines_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TESTS = """
import os, signal
def test_long(): sum(range(3_000_000))
def test_wrong(): assert os.environ["MUTANT"] != "wrong"
def test_endless():
    while os.environ["MUTANT"] == "endless": pass
    while os.environ["MUTANT"] == "stopped": signal.pause()
"""
SESSION = """
import os, sys
from functools import partial
from benchmarks import forked_tests
from benchmarks.forked_tests import Order, collect, measure
forked_tests.TEST_CPU_S = forked_tests.TEST_WALL_S = 1
def loop(items):
    os.environ["MUTANT"] = ""
    order = Order(measure(items))
    for mutant in ("wrong", "", "endless", "stopped"):
        tests = order.sorted(items)
        code = order.outcome(tests, items, partial(os.environ.__setitem__, "MUTANT", mutant))
        print(mutant, code, *(test.partition("::")[2] for test in tests), file=sys.__stderr__)
sys.exit(collect(["-p", "no:cacheprovider", *sys.argv[1:]], loop))
"""


def fail() -> None:
    raise AssertionError


def spin() -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))
    while True:
        pass


def pause() -> None:
    signal.alarm(1)
    signal.pause()


@pytest.mark.parametrize(
    ("work", "code"),
    [
        (lambda: None, SURVIVED),
        (fail, KILLED),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
        (pause, TIMEOUT),
        (spin, TIMEOUT),
    ],
)
def test_outcomes_of_child_processes(work: Callable[[], object], code: int) -> None:
    assert exit_code(forked(lambda: void(work()))) == code


def void(result: object) -> None: ...


def test_tests_that_killed_mutants_run_first(tmp_path: Path) -> None:
    """Otherwise in order; a test without end is stopped, also if it uses no CPU time."""
    (tmp_path / "test_example.py").write_text(TESTS)
    command = [sys.executable, "-c", SESSION, str(tmp_path), f"--rootdir={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    first, second, *others = (line.split() for line in result.stderr.splitlines())
    assert first == ["wrong", str(KILLED), "test_long", "test_wrong", "test_endless"]
    assert second == [str(SURVIVED), "test_wrong", "test_long", "test_endless"]
    assert others == [[name, str(TIMEOUT), *second[1:]] for name in ("endless", "stopped")]


LIMITED = """
import resource, sys
from benchmarks.forked_tests import Order, collect, measure
def loop(items):
    Order(measure(items)).require_survival(items, lambda: None)
    print("passed", file=sys.__stderr__)
sys.exit(collect(["-p", "no:cacheprovider", *sys.argv[1:]], loop))
"""


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_tests_that_fail_within_the_limits_of_mutants_are_refused(limit: str, tmp_path: Path) -> None:
    """Such tests would kill every mutant."""
    wanted = f"import resource\ndef test_limit():\n    assert resource.getrlimit(resource.{limit})[1] == -1\n"
    (tmp_path / "test_example.py").write_text(wanted)
    command = [sys.executable, "-c", LIMITED, str(tmp_path), f"--rootdir={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    refused = limit == "RLIMIT_AS"
    assert (result.returncode == KILLED) == refused and ("passed" in result.stderr) != refused
    assert ("fails within the limits of mutants: test_example.py::test_limit" in result.stderr) == refused


def test_lines_of_functions() -> None:
    source = (
        "#include <a.h>\n\n/* sum */\nstatic double sum(int n) {\n    return n;\n}\nINLINE vf least(vf a) { return a; }"
    )
    assert list(lines_of(source, ["sum"])) == [4, 5, 6] and list(lines_of(source, ["least"])) == [7]
    assert list(lines_of(source, [])) == [1, 2, 3, 4, 5, 6, 7]
    assert list(lines_of("#pragma once\n  _mm_prefetch(p, 1);\n  HOLD(v);\nint a;", [])) == [4]


def test_files_of_both_languages_are_refused_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(native_mutants, "test_files", lambda *args: calls.append(args) or True)
    assert mutants.main(["pass.c", "--sample", "3"]) == 0 and calls == [([Path("pass.c")], [], [], 3, 0)]
    assert mutants.main(["pass.c", "step.py"]) == 2
    assert "name either C files or Python files" in capsys.readouterr().err
