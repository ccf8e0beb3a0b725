"""Figures of a recorded run as the engines define them: table `engine-figures` of other-engines.md."""

from __future__ import annotations

import argparse
import re
import sys

from benchmarks.tables import ROOT, Study, publish, study_command
from specdemo.external.engine_log import FIGURES, figure_rows, read_engine_log

TABLES = {"engine-figures": "docs/other-engines.md"}
LOGS = ROOT / "tests" / "external" / "logs.txt"  # each log follows a line with its name
AR_SPEED = 100.0  # tokens/s; the log has no run without drafts


def recorded_logs() -> dict[str, str]:
    """Return logs of public threads, whose addresses are their first lines, by name."""
    _, *parts = re.split(r"^=== (.+)\n", LOGS.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def engine_figures() -> list[list[str]]:
    return list(figure_rows(read_engine_log(recorded_logs()["llama-eagle3.log"], AR_SPEED)))


def measure(options: argparse.Namespace) -> None:
    """Convert the counts of a log."""
    records = [dict(zip(FIGURES, row, strict=True)) for row in engine_figures()]
    publish(options, "engine-figures", {name: f"{{{name}}}" for name in FIGURES}, records)


main = study_command(__file__, __doc__, TABLES, Study(measure))

if __name__ == "__main__":
    sys.exit(main())
