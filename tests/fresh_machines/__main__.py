"""Create the systems, run the conditions and print a table: `python -m fresh_machines`, as root on Debian or Ubuntu.

`FRESH_MACHINES` names the folder of the chroots, which are kept. The outputs of all commands are stored in it, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fresh_machines.arm import arm_rows
from fresh_machines.systems import USER, Chroot, NotTested, Result, System

FOLDER = Path(os.environ.get("FRESH_MACHINES", "/var/tmp/fresh-machines"))
BASIC = ("make", "python3", "python3-venv")
SYSTEMS = {
    system.name: system
    for system in (
        System(
            "debian-12",
            "bookworm",
            "3.11",
            (*BASIC, "build-essential", "chromium-headless-shell", "iproute2"),
            "root",
            "/root/specdemo",
        ),
        System("debian-13", "trixie", "3.13", (*BASIC, "ubuntu-keyring"), USER, f"/home/{USER}/a folder/specdemo"),
        System("ubuntu", "noble", "3.12", (*BASIC, "build-essential"), USER, f"/home/{USER}/specdemo"),
    )
}
PAGE = "python3 tests/fresh_machines/open_page.py"
SMOKE = "make test ARGS='tests/test_app.py tests/test_generate.py tests/e2e/test_first_screen.py'"
KERNELS = "make test ARGS='tests/models/test_native_engine.py tests/models/test_vector_widths.py'"
RUN = '.venv/bin/python -m specdemo run "def f(n):" --pair bundled --max-tokens 8'
VECTORS = (
    f"""{RUN} --json | python3 -c "import json, sys; print(json.loads(next(sys.stdin))['environment']['vectors'])" """
)
EMPTY = """python3 -m venv "$HOME/empty" && "$HOME/empty/bin/pip" install -q . && cd / &&
"$HOME/empty/bin/specdemo" run "def f(n):" --pair bundled --max-tokens 8"""


@dataclass(frozen=True)
class Condition:
    """A command on a system with further `packages`. `refused`: it may end with a sentence instead of success."""

    system: str
    name: str
    command: str
    network: bool = True
    refused: bool = False
    read_only: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    packages: Sequence[str] = ()


HOME = f"/home/{USER}"
CONDITIONS = [
    Condition("debian-12", "root", "make setup"),
    Condition("debian-12", "page", PAGE),
    Condition("debian-12", "tests with a browser", SMOKE),
    Condition("debian-12", "fast tests", "make test-fast"),
    Condition("debian-12", "no network: page", PAGE, network=False),
    Condition("debian-12", "no network: fast tests", "make test-fast", network=False),
    Condition("debian-12", "AVX2", VECTORS, environment={"SPECDEMO_VECTORS": "avx2"}),
    Condition("debian-12", "AVX2: kernels", KERNELS, environment={"SPECDEMO_VECTORS": "avx2"}),
    Condition("debian-13", "user, path with spaces, no compiler", "make setup"),
    Condition("debian-13", "page", PAGE),
    Condition("debian-13", "pip install . in an empty environment", EMPTY),
    Condition("debian-13", "a compiler added: fast tests", "make test-fast", packages=("build-essential",)),
    Condition("ubuntu", "user", "make setup"),
    Condition("ubuntu", "page", PAGE),
    Condition("ubuntu", "fast tests", "make test-fast"),
    Condition("ubuntu", "home read-only", RUN, refused=True, read_only=(HOME,)),
    Condition("ubuntu", "home read-only: page", PAGE, refused=True, read_only=(HOME,)),
    Condition("ubuntu", "program read-only: page", PAGE, refused=True, read_only=(f"{HOME}/specdemo",)),
    Condition("ubuntu", "/tmp read-only", RUN, refused=True, read_only=("/tmp",)),
    Condition("ubuntu", "/tmp read-only: page", PAGE, refused=True, read_only=("/tmp",)),
    Condition(
        "ubuntu", "home and all temporary folders read-only", RUN, refused=True, read_only=(HOME, "/tmp", "/var/tmp")
    ),
    Condition("ubuntu", "the same: page", PAGE, refused=True, read_only=(HOME, "/tmp", "/var/tmp")),
    Condition(
        "ubuntu",
        "program read-only before the set-up",
        f"VENV=$HOME/other {PAGE}",
        refused=True,
        read_only=(f"{HOME}/specdemo",),
    ),
]


def outcome(condition: Condition, result: Result) -> str:
    """Return the cell of the table."""
    if "Traceback (most recent call last)" in result.output and " passed" not in result.last_line:
        return f"failed: traceback: {result.last_line}"
    if result.code == 0:
        return f"passed: {result.last_line}"
    return f"{'refused' if condition.refused else 'failed'}, exit code {result.code}: {result.last_line}"


def rows_of(system: System, conditions: Sequence[Condition]) -> list[list[str]]:
    chroot = Chroot(system, FOLDER)
    described = f"{system.name}, Python {system.python}, {system.account}"
    try:
        chroot.create()
    except NotTested as reason:
        return [[described, condition.name, f"not tested: {reason}"] for condition in conditions]
    rows = []
    for condition in conditions:
        start = time.monotonic()
        try:
            chroot.install(condition.packages)
        except NotTested as reason:
            rows.append([described, condition.name, f"not tested: {reason}"])
            continue
        result = chroot.run(
            condition.command,
            network=condition.network,
            read_only=condition.read_only,
            environment=condition.environment,
        )
        name = "".join(c if c.isalnum() else "-" for c in condition.name)
        (FOLDER / f"{system.name}-{name}.log").write_text(result.output, "utf-8")
        rows.append([described, condition.name, outcome(condition, result)])
        print(*rows[-1], f"{time.monotonic() - start:.0f} s", sep=" | ", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a condition failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--systems", nargs="*", default=[*SYSTEMS, "arm"], choices=[*SYSTEMS, "arm"])
    parser.add_argument("--only", default="", help="part of the name of conditions")
    options = parser.parse_args(arguments)
    if os.geteuid():
        print("chroots need root: run the program with sudo", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in options.systems:
        if name == "arm":
            rows += arm_rows(FOLDER)
        else:
            chosen = [c for c in CONDITIONS if c.system == name and options.only in c.name]
            rows += rows_of(SYSTEMS[name], chosen)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"\nCommit {commit}:\n\n| system | condition | result |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(any(row[-1].startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
