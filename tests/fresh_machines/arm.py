"""The engine for 64-bit ARM, cross-compiled and run in an emulator of the processor."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

from fresh_machines.systems import ROOT, NotTested, Result, checked, debian_mirror
from specdemo.native.interface import DIGEST

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"  # of Debian's cross-compiler
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-pthread", "-march=armv8-a", f"-DINTERFACE_DIGEST={DIGEST}")
PACKAGES = ("python3", "python3-numpy")
PASSES = """
import ctypes, platform, random, sys
from dataclasses import replace
import numpy as np
from fakes import native_fuzz
from fakes.native_structures import Cache, RandomModel, Rows, random_shape
from specdemo.native.formats import FORMATS
from specdemo.native.interface import Result, declare

assert platform.machine() == "aarch64"
library, rng = ctypes.CDLL(sys.argv[1]), random.Random(1)
declare(library)
for form in [*FORMATS] * 3:
    model = RandomModel(library, replace(random_shape(rng, form), fused=0, slots=0, rank=0))
    together, alone = Cache(model, 48), Cache(model, 48)
    ids = [rng.randrange(model.shape.vocab) for _ in range(17)]
    rows = Rows(together, ids, 0)
    assert rows.run() == Result.DONE
    for i, token in enumerate(ids):
        single = Rows(alone, [token], i, threads=1)
        assert single.run() == Result.DONE
        np.testing.assert_array_equal(rows.logits[i], single.logits[0])
native_fuzz.main(sys.argv[1], 1, 3)
print(f"rows of {len(FORMATS)} number formats have the bits of single rows; random and hostile passes are safe")
"""
CHECK = """#include <stdio.h>
int self_check(void);
int main(void) { int faults = self_check(); printf("self_check returned %d", faults); return faults; }
"""


def arm_rows(folder: Path) -> list[list[str]]:
    """Return the rows of the table: the check of the engine, and random passes with Python for ARM."""
    described = "64-bit ARM, emulated"
    rows = []
    for name, test in (("self_check", _self_check), ("random passes", _passes)):
        try:
            result = test(folder)
            outcome = f"{'failed' if result.code else 'passed'}: {result.last_line}"
        except NotTested as reason:
            outcome = f"not tested: {reason}"
        rows.append([described, name, outcome])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def _run(*command: str) -> Result:
    done = subprocess.run(command, stdout=-1, stderr=-2, text=True, errors="replace")
    return Result(done.returncode, done.stdout)


@cache
def _compiled(folder: Path) -> Path:
    for program, package in ((COMPILER, "gcc-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(program) is None:
            raise NotTested(f"{program} is missing: apt install {package}")
    library = folder / "native-aarch64.so"
    sources = map(str, sorted((ROOT / "specdemo/native").glob("*.c")))
    result = _run(COMPILER, *FLAGS, "-shared", *sources, "-o", str(library), "-lm")
    if result.code:
        raise NotTested(f"the cross-compiler failed: {result.last_line}")
    return library


def _self_check(folder: Path) -> Result:
    library, source = _compiled(folder), folder / "check.c"
    source.write_text(CHECK, "utf-8")
    program = str(folder / "check-aarch64")
    built = _run(COMPILER, str(source), str(library), f"-Wl,-rpath,{folder}", "-lm", "-o", program)
    return built if built.code else _run(EMULATOR, "-L", LIBRARIES, program)


def _passes(folder: Path) -> Result:
    """Compare rows, and run random and hostile passes, with Python and numpy for ARM."""
    library, system = _compiled(folder), folder / "debian-12-arm64"
    if not (system / "etc/created").exists():
        _extract(system)
    of_system = system / "usr/lib/aarch64-linux-gnu"
    search = f"LD_LIBRARY_PATH={of_system}/blas:{of_system}/lapack"
    modules = ":".join(map(str, (ROOT, ROOT / "tests", system / "usr/lib/python3/dist-packages")))
    options = ["-L", str(system), "-E", search, "-E", f"PYTHONPATH={modules}", "-E", "PYTHONDONTWRITEBYTECODE=1"]
    return _run(EMULATOR, *options, str(system / "usr/bin/python3"), "-c", PASSES, str(library))


def _extract(system: Path) -> None:
    """Extract the packages of an ARM system, which is never started."""
    options = ["--arch=arm64", "--foreign", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    checked("debootstrap", *options, "bookworm", str(system), debian_mirror())
    for package in sorted(system.glob("var/cache/apt/archives/*.deb")):
        checked("dpkg-deb", "-x", str(package), str(system))
    (system / "etc/created").touch()
