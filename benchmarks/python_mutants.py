"""Mutants of functions of `core/` and `drafters/`: mutmut generates them and shows them with `mutmut show NAME`.

mutmut's runner collects the tests for each mutant, which takes longer than the tests. Here a process collects them
once, and each mutant is tested in a fork of it. A function that runs during imports is tested in a new session.
"""

from __future__ import annotations

import importlib
import os
import pickle
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from mutmut.__main__ import copy_also_copy_files, copy_src_dir, create_mutants, setup_source_paths
from mutmut.configuration import config
from mutmut.mutation.data import MutantLineSpans, SourceFileMutationData
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state

from benchmarks.forked_tests import (
    KILLED,
    NO_TESTS,
    SKIPPED,
    SURVIVED,
    Items,
    Order,
    collect,
    exit_code,
    forked,
    limit,
    measure,
    run_until_failure,
)

FOLDER = Path("mutants").resolve()
COVERAGE = FOLDER / "coverage.pickle"
COLLECTION_S = 20.0  # CPU seconds
STATISTICS = "stats"  # name of the run that records called functions
# Arguments whose mutants are not run, since no test on a CPU can detect them: `zip` receives equal lengths by
# construction, and all tensors are on the same device.
NEUTRAL_ARGUMENTS = ("strict=True", "strict=False", ".device", "non_blocking=True")


@dataclass
class Coverage:
    """Tests that call each function, CPU seconds of each test, and functions called during imports."""

    tests: dict[str, set[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)
    modules: list[str] = field(default_factory=list)  # imported by tests

    def of(self, mutant: str) -> set[str]:
        """Return the tests of a mutant."""
        return set(self.seconds) if self.during_import(mutant) else self.tests.get(_function(mutant), set())

    def during_import(self, mutant: str) -> bool:
        return _function(mutant) in self.imported


def _function(mutant: str) -> str:
    return mutant.partition("__mutmut_")[0]


def _neutral(mutants: Sequence[str], file: Path) -> Iterator[str]:
    """Yield the mutants that change a neutral argument."""
    names = [mutant.rpartition(".")[2] for mutant in mutants]
    listed = list(dict.fromkeys([*names, *(f"{_function(name)}__mutmut_orig" for name in names)]))
    sources = dict(zip(listed, MutantLineSpans.load(file).read_function_sources(listed), strict=True))
    for mutant, name in zip(mutants, names, strict=True):
        original = sources[f"{_function(name)}__mutmut_orig"]
        if any(original.count(argument) > sources[name].count(argument) for argument in NEUTRAL_ARGUMENTS):
            yield mutant


class Results:
    """Results of the mutants of files, in mutmut's format."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._data = {file: SourceFileMutationData(path=file) for file in files}
        for file, data in self._data.items():
            data.meta_path = FOLDER / f"{file}.meta"
            data.load()

    def pending(self, codes: Collection[int | None]) -> list[str]:
        """Return the mutants with these codes: survivors, then others in random order, as a sample if interrupted."""
        codes_by_name = {name: code for data in self._data.values() for name, code in data.exit_code_by_key.items()}
        names = [name for name, code in codes_by_name.items() if code in codes]
        random.Random(0).shuffle(names)
        return sorted(names, key=lambda name: codes_by_name[name] is None)

    def skip_neutral(self) -> None:
        """Record the mutants of `NEUTRAL_ARGUMENTS`."""
        for file, data in self._data.items():
            codes = data.exit_code_by_key
            codes |= dict.fromkeys(_neutral([name for name, code in codes.items() if code != KILLED], file), SKIPPED)
            data.save()

    def record(self, mutant: str, code: int) -> None:
        if code != KILLED:
            print(f"{code:4} {mutant}", file=sys.__stderr__, flush=True)
        data = next(data for data in self._data.values() if mutant in data.exit_code_by_key)
        data.exit_code_by_key[mutant] = code
        data.save()

    def records(self) -> list[dict[str, Any]]:
        """Return the counts of each file with tested mutants, and of all; `skipped` mutants are excluded."""
        counts = {str(file): Counter(data.exit_code_by_key.values()) for file, data in self._data.items()}
        counts = {file: codes for file, codes in counts.items() if codes.total() > codes[None] + codes[SKIPPED]}
        counts["all"] = sum(counts.values(), Counter())
        return [_record(file, codes) for file, codes in counts.items()]


def _record(file: str, codes: Counter[int | None]) -> dict[str, Any]:
    tested = codes.total() - codes[None] - codes[SKIPPED]
    survivors = codes[SURVIVED] + codes[NO_TESTS]
    return {
        "file": file.removeprefix("specdemo/"),
        "mutants": codes.total(),
        "skipped": codes[SKIPPED],
        "untested": codes[None],
        "tested": tested,
        "killed": tested - survivors,
        "survivors": survivors,
        "share": f"{100 * (1 - survivors / max(1, tested)):.1f} %",
    }


def test_mutants(files: Sequence[Path], codes: Collection[int | None]) -> bool:
    """Test the mutants of `files` whose result is in `codes`. Return False if a test fails without mutants."""
    if exit_code(forked(lambda: _session(files, codes))):
        return False
    results, coverage = Results(files), _coverage()
    for mutant in filter(coverage.during_import, results.pending(codes)):
        results.record(mutant, _tested_in_new_session(mutant, coverage))
    return True


def _session(files: Sequence[Path], codes: Collection[int | None]) -> None:
    def loop(items: Items) -> None:
        if exit_code(forked(lambda: _record_coverage(items))):
            os._exit(KILLED)
        results, coverage = Results(files), _coverage()
        coverage.imported |= _imported(coverage.modules)
        COVERAGE.write_bytes(pickle.dumps(coverage))
        order = Order(coverage.seconds)
        order.require_survival(items, partial(set_mutant_under_test, ""))
        for mutant in results.pending(codes):
            if not coverage.during_import(mutant):
                tests = order.sorted(coverage.of(mutant))
                prepare = partial(set_mutant_under_test, mutant)
                results.record(mutant, order.outcome(tests, items, prepare) if tests else NO_TESTS)

    set_mutant_under_test(STATISTICS)
    if _collect(loop):
        os._exit(KILLED)


def _collect(loop: Callable[[Items], None]) -> int:
    os.chdir(FOLDER)
    return collect(["--rootdir=.", *config().pytest_add_cli_args, *config().pytest_add_cli_args_test_selection], loop)


def _imported(modules: Collection[str]) -> set[str]:
    """Import modules before the forks; return the functions that are called meanwhile."""
    for name in modules:
        with suppress(Exception):  # not all names in sys.modules are modules
            importlib.import_module(name)
    return set(state()._stats)


def _record_coverage(items: Items) -> None:
    calls, tests, known = state()._stats, defaultdict(set), set(sys.modules)
    imported = set(calls)
    calls.clear()

    def ended(test: str) -> None:
        for function in calls:
            tests[function].add(test)
        calls.clear()

    seconds = measure(items, ended)
    assert tests, "the tests call no mutated function"
    modules = [name for name in sys.modules if name not in known]
    COVERAGE.write_bytes(pickle.dumps(Coverage(dict(tests), seconds, imported, modules)))


def _coverage() -> Coverage:
    coverage: Coverage = pickle.loads(COVERAGE.read_bytes())
    return coverage


def _tested_in_new_session(mutant: str, coverage: Coverage) -> int:
    def loop(items: Items) -> None:
        tests = sorted(coverage.of(mutant), key=coverage.seconds.__getitem__)
        run_until_failure([items[test] for test in tests if test in items], coverage.seconds)
        os._exit(SURVIVED)

    def work() -> None:
        set_mutant_under_test(mutant)
        limit(COLLECTION_S)
        _collect(loop)
        os._exit(KILLED)  # the tests could not be collected

    return exit_code(forked(work))


def test_files(files: Sequence[Path], tests: Sequence[str], again: bool) -> bool:
    """Generate the mutants of `files` and test them unless they have a result, or with `again` if they survived.

    `tests` replace those of pyproject.toml. Return False if a test fails without mutants.
    """
    selection = config().pytest_add_cli_args_test_selection
    selection[:] = tests or selection
    set_mutant_under_test("mutant_generation")
    FOLDER.mkdir(exist_ok=True)
    with redirect_stdout(StringIO()):  # names of all files
        copy_src_dir()
        copy_also_copy_files()
        setup_source_paths()
        create_mutants(1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "specdemo"]:
        del sys.modules[name]  # without mutants, imported by the package of this module
    import torch  # noqa: F401  # shared by all sessions

    Results(files).skip_neutral()
    return test_mutants(files, (None, SURVIVED, NO_TESTS) if again else (None,))
