"""Start of the terminal program with the chat model: table `start_times` in docs/native-engine.md.

`python -m benchmarks.start_times --write`, as root: `cold disk` empties the page cache of the system, `first start`
also has an empty folder of compiled engines. Times end with the first token on standard output.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import ROOT, publish, run_study, study_parser
from specdemo.bench.table import Progress
from specdemo.cli.arguments import at_least_one
from specdemo.core.errors import UserError
from specdemo.models.zoo import CHAT_PAIR

TABLES = {"start_times": "docs/native-engine.md"}
PAGE_CACHE = Path("/proc/sys/vm/drop_caches")
PROMPT = "Why is the sky blue?"
STATES = {"files in memory": (False, False), "cold disk": (True, False), "first start, cold disk": (True, True)}
COLUMNS = {
    "state": "{state}",
    "starts": "{starts}",
    "first token s, median": "{median:.2f}",
    "shortest and longest": "{shortest:.2f}, {longest:.2f}",
}


def seconds_to_first_token(cold: bool, compiles: bool) -> float:
    """Start the program and return the seconds until its first step is printed."""
    if cold:
        os.sync()
        PAGE_CACHE.write_text("3")
    command = [sys.executable, "-m", "specdemo", "run", PROMPT, "--pair", CHAT_PAIR, "--max-tokens", "8", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **({"XDG_CACHE_HOME": folder} if compiles else {})}
        start = time.perf_counter()
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout
            for line in process.stdout:
                if line.startswith('{"i":'):
                    elapsed = time.perf_counter() - start
                    process.communicate()
                    return elapsed
    raise UserError(f"the run printed no token: run `specdemo run --pair {CHAT_PAIR} --json` and read its message")


def study(options: argparse.Namespace) -> None:
    """Publish the times of all states."""
    at_least_one("starts", options.starts)
    if not os.access(PAGE_CACHE, os.W_OK):
        raise UserError(f"{PAGE_CACHE} is not writable: run the study as root")
    records, progress = [], Progress()
    seconds_to_first_token(cold=False, compiles=False)
    for state, (cold, compiles) in STATES.items():
        times = []
        for number in range(options.starts):
            times.append(seconds_to_first_token(cold, compiles))
            progress.show(f"{state}: {number + 1} of {options.starts}")
        spread = {"median": statistics.median(times), "shortest": min(times), "longest": max(times)}
        records.append({"state": state, "starts": len(times), **spread})
    progress.over()
    publish(options, "start_times", COLUMNS, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--starts", type=int, default=10)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
