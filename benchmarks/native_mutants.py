"""Mutants of C files: universalmutator generates them.

Mutants that compile to other code must fail the check after compiling, or a test. Results are kept in
`build/native_mutants`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.forked_tests import (
    KILLED,
    SURVIVED,
    TIMEOUT,
    Items,
    Order,
    collect,
    exit_code,
    forked,
    measure,
)
from specdemo.native import build
from specdemo.native.interface import declare

FOLDER = Path("build/native_mutants").resolve()
TESTS = (
    "tests/core/test_sampling.py",
    "tests/core/test_block_verification.py",
    "tests/models/test_native_engine.py",
    "tests/models/test_native_attention.py",
    "tests/models/test_native_safety.py",
    "tests/models/test_native_properties.py",
    "tests/models/test_several_texts.py",
    "tests/models/test_batched_texts.py",
    "tests/models/test_hidden_states.py",
    "tests/models/test_activations.py",
    "tests/models/test_stop.py::test_stop_ends_a_pass_of_a_job",
    "tests/models/test_stop.py::test_a_time_limit_ends_a_pass",
    "tests/models/test_heads.py",
    "tests/models/test_published_heads.py",
    "tests/drafters/test_block_head.py",
    "tests/drafters/test_eagle.py",
    "tests/drafters/test_head_proposals.py",
)
CHECK_CPU_S = 5
UNCOMPILED, SAME_CODE = "not compiled", "same code"
OUTCOMES = {SURVIVED: "survived", TIMEOUT: "timeout"}
_WITHOUT_EFFECT = re.compile(r"^\s*(#pragma|HOLD\(|upcoming |now\.step|g\.after)|prefetch", re.IGNORECASE)  # on results
_PREFETCH = re.compile(r"upcoming|following|set_after|after\[|int64_t next = \(")  # addresses
_TRAPS = ("-fsanitize=bounds", "-fsanitize-undefined-trap-on-error", "-Werror=return-type")
_FUNCTION = re.compile(r"^(?:static |INLINE )?[a-z]\w*[ *]+(\w+)\(", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """Changed source of a file; `key` names it in the results."""

    file: Path
    source: str

    @property
    def key(self) -> str:
        return f"{self.file.name}:{hashlib.sha256(self.source.encode()).hexdigest()[:16]}"

    @property
    def change(self) -> str:
        """First changed line; empty if only the end differs."""
        pairs = enumerate(zip(self.file.read_text("utf-8").splitlines(), self.source.splitlines(), strict=False), 1)
        return next((f"{i}: {old.strip()}  ->  {new.strip()}" for i, (old, new) in pairs if old != new), "")


def mutants(file: Path, functions: Sequence[str]) -> list[Mutant]:
    """Return the different mutants of a file, or of some of its functions, in the order of universalmutator."""
    folder, lines = FOLDER / file.stem, FOLDER / f"{file.stem}.lines"
    folder.mkdir(parents=True, exist_ok=True)
    lines.write_text("\n".join(map(str, lines_of(file.read_text("utf-8"), functions))))
    if not any(folder.iterdir()):
        command = ["mutate", str(file), "c", "--noCheck", "--mutantDir", str(folder), "--lines", str(lines)]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PATH": path}, cwd=folder)
    numbered = sorted(folder.glob("*.mutant.*.c"), key=lambda path: int(path.name.split(".")[-2]))
    sources = dict.fromkeys(path.read_text("utf-8") for path in numbered)
    return [Mutant(file, source) for source in sources]


def lines_of(source: str, functions: Sequence[str]) -> Iterator[int]:
    """Yield the numbers of lines of functions, of the whole file if none is named, without pragmas and hints."""
    name = None
    for number, line in enumerate(source.splitlines(), 1):
        if found := _FUNCTION.match(line):
            name = found[1]
        if (not functions or name in functions) and not _WITHOUT_EFFECT.search(line):
            yield number
        if line.startswith("}"):
            name = None


class Engine:
    """Objects of all files, which are linked with the object of a mutant."""

    def __init__(self) -> None:
        self._command = [*build._command(), *_TRAPS]
        self._objects = {path.name: FOLDER / f"{path.stem}.o" for path in sorted(build.SOURCES.glob("*.c"))}
        for name, path in self._objects.items():
            self._compile(build.SOURCES / name, path)

    def _compile(self, source: Path, to: Path) -> bool:
        command = [*self._command, "-I", str(build.SOURCES), source.name]
        return all(
            not subprocess.run([*command, *options], cwd=source.parent, stderr=subprocess.DEVNULL).returncode
            for options in (["-fsyntax-only"], ["-c", "-o", str(to)])  # most invalid mutants fail early
        )

    def link(self, mutant: Mutant | None = None) -> Path | str:
        """Return the library, or why there is no mutant."""
        objects = dict(self._objects)
        if mutant:
            source, compiled = FOLDER / "mutant" / mutant.file.name, FOLDER / "mutant" / f"{mutant.file.stem}.o"
            source.parent.mkdir(exist_ok=True)
            source.write_text(mutant.source, "utf-8")
            if not self._compile(source, compiled):
                return UNCOMPILED
            if compiled.read_bytes() == objects[mutant.file.name].read_bytes():
                return SAME_CODE
            objects[mutant.file.name] = compiled
        library = FOLDER / "mutant.so"
        library.unlink(missing_ok=True)  # loaded libraries keep the old file
        command = [*self._command, "-shared", *map(str, objects.values()), "-o", str(library), "-lm"]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            return UNCOMPILED
        return library


def use(library: Path) -> None:
    """Make the engine load `library` in this process. End the process with `KILLED` if the engine refuses it."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CHECK_CPU_S, resource.RLIM_INFINITY))
    loaded = ctypes.CDLL(str(library))
    if loaded.self_check():
        os._exit(KILLED)
    declare(loaded)

    def load() -> ctypes.CDLL:
        if os.environ.get(build.SWITCH) == "0":  # tests of the fallback
            raise build.NativeUnavailable("disabled")
        return loaded

    build._load = load
    build.native_library.cache_clear()
    assert build.required_library() is loaded


class Results:
    """Outcomes of mutants by key, in a file."""

    def __init__(self) -> None:
        self._path = FOLDER / "results.json"
        self.outcomes: dict[str, str] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def record(self, mutant: Mutant, outcome: str) -> None:
        self.outcomes[mutant.key] = outcome
        self._path.write_text(json.dumps(self.outcomes, indent=0))
        if outcome in OUTCOMES.values():
            print(f"{outcome}: {mutant.file.name}:{mutant.change}", file=sys.__stderr__, flush=True)


def run(chosen: Sequence[Mutant], sample: int | None, tests: Sequence[str]) -> bool:
    """Test mutants in order until `sample` have other code. Return False if the tests fail without mutants."""
    engine, results = Engine(), Results()
    original = engine.link()
    assert isinstance(original, Path)

    def loop(items: Items) -> None:
        durations = FOLDER / "seconds.json"

        def unchanged() -> None:
            use(original)
            resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            durations.write_text(json.dumps(measure(items)))

        if exit_code(forked(unchanged)):
            os._exit(KILLED)
        order, count = Order(json.loads(durations.read_text())), 0
        order.require_survival(items, partial(use, original))
        for mutant in chosen:
            if mutant.key not in results.outcomes:
                results.record(mutant, _outcome(engine.link(mutant), items, order))
            count += results.outcomes[mutant.key] not in (UNCOMPILED, SAME_CODE)
            if count == sample:
                return

    return not exit_code(forked(lambda: _ended(collect(["-m", "not exhaustive", *tests], loop))))


def _ended(code: int) -> None:
    if code:
        os._exit(KILLED)


def _outcome(library: Path | str, items: Items, order: Order) -> str:
    if isinstance(library, str):
        return library
    return OUTCOMES.get(order.outcome(order.sorted(items), items, partial(use, library)), "killed")


def test_files(
    files: Sequence[Path], tests: Sequence[str], functions: Sequence[str], sample: int | None, seed: int
) -> bool:
    """Test the mutants of `files`, or `sample` random ones; print the counts. Return False if tests fail without."""
    chosen = [mutant for file in files for mutant in mutants(file.resolve(), functions)]
    if sample:
        random.Random(seed).shuffle(chosen)
    chosen = [mutant for mutant in chosen if not _PREFETCH.search(mutant.change)]
    if not run(chosen, sample, tests or TESTS):
        return False
    outcomes = Results().outcomes
    counts = Counter(outcomes[mutant.key] for mutant in chosen if mutant.key in outcomes)
    tested = counts["killed"] + counts["timeout"] + counts["survived"]
    print(f"{tested} tested, {dict(counts)}, {100 * (1 - counts['survived'] / max(1, tested)):.1f} % killed")
    return True
