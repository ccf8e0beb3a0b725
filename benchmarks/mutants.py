"""Mutation tests: each small change of a C file, or of a function of `core/` or `drafters/`, must make a test fail.

`python -m benchmarks.mutants FILE...` tests the mutants of these files, or of all files of a folder, without a result,
so an interrupted run continues. `--table --write` writes the table `mutants` (docs/reliability.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.tables import publish, run_study, study_parser
from specdemo.core.errors import UserError

TABLES = {"mutants": "docs/reliability.md"}
COLUMNS = {
    "file": "{file}",
    "mutants": "{mutants:,}",
    "excluded": "{skipped}",
    "untested": "{untested:,}",
    "tested": "{tested:,}",
    "killed": "{killed:,}",
    "survivors": "{survivors}",
    "killed of tested": "{share}",
}


def sources(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield files, and the Python files of folders."""
    for path in paths:
        yield from sorted(path.glob("*.py")) if path.is_dir() else [path]


def study(options: argparse.Namespace) -> bool:
    """Test mutants; return True if tests fail without a mutant. Raises `UserError`."""
    files = list(sources(options.files))
    suffixes = {file.suffix for file in files}
    if suffixes == {".c"}:
        from benchmarks import native_mutants

        return not native_mutants.test_files(files, options.tests, options.functions, options.sample, options.seed)
    if suffixes != {".py"}:
        raise UserError("name either C files or Python files")
    from benchmarks import python_mutants

    if not (options.table or python_mutants.test_files(files, options.tests, options.again)):
        return True
    publish(options, "mutants", COLUMNS, python_mutants.Results(files).records())
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("files", nargs="+", type=Path, help="C files of specdemo/native, or files of core or drafters")
    parser.add_argument("--tests", nargs="+", default=[], help="tests to run instead of the default ones")
    python = parser.add_argument_group("Python files")
    python.add_argument("--again", action="store_true", help="repeat the survivors")
    python.add_argument("--table", action="store_true", help="print the results of earlier runs only")
    native = parser.add_argument_group("C files")
    native.add_argument("--functions", nargs="+", default=[], help="names of functions (default: all)")
    native.add_argument("--sample", type=int, help="number of random mutants (default: all)")
    native.add_argument("--seed", type=int, default=0)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
