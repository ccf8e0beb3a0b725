"""Mutation tests: each small change of a C file, or of a function of `core/` or `drafters/`, must make a test fail.

`python -m benchmarks.mutants FILE...` tests the mutants of these files without a result, so an interrupted run
continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="C files of specdemo/native, or files of core or drafters")
    parser.add_argument("--tests", nargs="+", default=[], help="tests to run instead of the default ones")
    python = parser.add_argument_group("Python files")
    python.add_argument("--again", action="store_true", help="repeat the survivors")
    python.add_argument("--table", action="store_true", help="print the results of earlier runs only")
    native = parser.add_argument_group("C files")
    native.add_argument("--functions", nargs="+", default=[], help="names of functions (default: all)")
    native.add_argument("--sample", type=int, help="number of random mutants (default: all)")
    native.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    suffixes = {file.suffix for file in args.files}
    if suffixes == {".c"}:
        from benchmarks import native_mutants

        passed = native_mutants.test_files(args.files, args.tests, args.functions, args.sample, args.seed)
    elif suffixes == {".py"}:
        from benchmarks import python_mutants

        passed = args.table or python_mutants.test_files(args.files, args.tests, args.again)
        if passed:
            for row in python_mutants.Results(args.files).rows():
                print("| " + " | ".join(map(str, row)) + " |")
    else:
        parser.error("name either C files or Python files")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
