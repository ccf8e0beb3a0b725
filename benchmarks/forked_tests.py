"""Tests that are collected once and then run in forked processes, each with a mutant of the program."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
from _pytest.runner import runtestprotocol

SURVIVED, KILLED, NO_TESTS, SKIPPED, TIMEOUT = 0, 1, 33, 34, 36  # codes of mutmut
MEMORY = 8 << 30
# Limits of a test that passes without a mutant within t CPU seconds: 30 + 10 t of CPU time, 120 + 30 t of wall time.
TEST_CPU_S, CPU_FACTOR = 30, 10  # includes shared fixtures
TEST_WALL_S, WALL_FACTOR = 120, 30

MOST_FIRST = 20  # tests that precede the modules

Items = Mapping[str, pytest.Item]


def _module(test: str) -> str:
    return test.partition("::")[0]


class _Loop:
    """Pytest plugin that replaces the loop over the collected tests."""

    def __init__(self, loop: Callable[[Items], None]) -> None:
        self._loop = loop

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not session.testsfailed:
            gc.freeze()  # collections in forks are short
            self._loop({item.nodeid: item for item in session.items})
        return True


def collect(arguments: Sequence[str], loop: Callable[[Items], None]) -> int:
    """Collect tests and call `loop` with them by id; return pytest's exit code."""
    return int(pytest.main(["-q", "--tb=no", "--assert=plain", *arguments], plugins=[_Loop(loop)]))


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child process; return the process id. Its exit code is `SURVIVED` unless `work` fails."""
    pid = os.fork()
    if pid:
        return pid
    code = KILLED
    try:
        work()
        code = SURVIVED
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    """Wait for a child process; return its exit code, or `TIMEOUT`."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return TIMEOUT if code in (-signal.SIGXCPU, -signal.SIGALRM) else code


def limit(seconds: float = 0.0) -> None:
    """Limit the time until the next call, for a test that passes within `seconds` of CPU time."""
    cpu = time.process_time() + TEST_CPU_S + CPU_FACTOR * seconds
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, resource.RLIM_INFINITY))
    signal.alarm(int(TEST_WALL_S + WALL_FACTOR * seconds) + 1)


class Order:
    """Order of tests: those that killed most mutants, then modules by duration, whose fixtures are made once each."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds, self._kills = seconds, Counter[str]()
        self._module_seconds = Counter[str]()
        for test, duration in seconds.items():
            self._module_seconds[_module(test)] += duration

    def sorted(self, tests: Iterable[str]) -> list[str]:
        chosen = set(tests)
        first = [test for test, _ in self._kills.most_common() if test in chosen][:MOST_FIRST]
        chosen.difference_update(first)
        rest = [test for test in self._seconds if test in chosen]  # as collected
        return first + sorted(rest, key=lambda test: (self._module_seconds[_module(test)], _module(test)))

    def outcome(self, tests: Sequence[str], items: Items, prepare: Callable[[], None]) -> int:
        """Run tests in a child process, after `prepare`; return its exit code and count the test that failed."""
        reading, writing = os.pipe()

        def work() -> None:
            limit()
            prepare()
            run_until_failure([items[test] for test in tests], self._seconds, writing)

        code = exit_code(forked(work))
        os.close(writing)
        with os.fdopen(reading) as pipe:
            self._kills.update(filter(None, [pipe.read()]))
        return code

    def require_survival(self, items: Items, prepare: Callable[[], None]) -> None:
        """End the process if a test fails without a mutant, within the limits of mutants."""
        if self.outcome(self.sorted(items), items, prepare):
            failed = next(iter(self._kills), "all tests together")
            os.write(2, f"fails within the limits of mutants: {failed}\n".encode())
            os._exit(KILLED)


def run_until_failure(items: Sequence[pytest.Item], seconds: Mapping[str, float], report: int | None = None) -> None:
    """Run the tests; end the process with `KILLED` after the first that fails, whose id is written to `report`."""
    faulthandler.disable()  # crashes are results
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for item, following in zip(items, [*items[1:], None], strict=True):
        limit(seconds[item.nodeid])
        if fails(item, following):
            if report is not None:
                os.write(report, item.nodeid.encode())
            os._exit(KILLED)


def measure(items: Items, ended: Callable[[str], None] = lambda test: None) -> dict[str, float]:
    """Run all tests without a mutant; return their CPU seconds. End the process if one fails."""
    listed = list(items.values())
    seconds = {}
    for item, following in zip(listed, [*listed[1:], None], strict=True):
        began = time.process_time()
        if fails(item, following):
            os.write(2, f"fails without a mutant: {item.nodeid}\n".encode())
            os._exit(KILLED)
        seconds[item.nodeid] = time.process_time() - began
        ended(item.nodeid)
    return seconds


def fails(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Run a test; return True if it failed."""
    failed = any(report.failed for report in runtestprotocol(item, log=False, nextitem=following))
    gc.collect()  # models in cycles would exceed `MEMORY`
    return failed
