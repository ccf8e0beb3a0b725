"""Acceptance of a head over the amount of its training data: table `head-data` in docs/heads.md.

`python -m training.head.data_curve TOKENS=DIRECTORY ... --write`: directories written by `python -m training.head`,
with the tokens of their training conversations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import publish, run_study, study_parser
from specdemo.core.errors import UserError
from training.head.checkpoint import trained_tokens
from training.head.conversations import SETTINGS

TABLES = {"head-data": "docs/heads.md"}
PREDICTED = 10_000_000  # tokens
GAMMA = "5"
COLUMNS = {
    "training data, M tokens": "{data:.1f}",
    "tokens seen, M": "{seen}",
    **{f"{name}: accepted at 1": f"{{first_{name}}}" for name in SETTINGS},
    **{f"{name}: tokens/pass, gamma 5": f"{{passes_{name}:.2f}}" for name in SETTINGS},
}


def last_record(argument: str) -> dict[str, Any]:
    """Return the figures of an argument `TOKENS=DIRECTORY`: tokens, and the last evaluation there."""
    tokens, _, folder = argument.partition("=")
    curve = Path(folder) / "curve.jsonl"
    if not tokens.isdecimal() or not curve.is_file():
        raise UserError(f"{argument} is not TOKENS=DIRECTORY with a directory of `python -m training.head`")
    record = json.loads(curve.read_text("utf-8").splitlines()[-1])
    values: dict[str, Any] = {"data": int(tokens) / 1e6, "seen": f"{trained_tokens(Path(folder)) / 1e6:.1f}"}
    for name in SETTINGS:
        values[f"first_{name}"] = f"{record[name]['rates'][0]:.2f}"
        values[f"passes_{name}"] = record[name]["tokens"][GAMMA]
    return values


def study(options: argparse.Namespace) -> None:
    """Publish the figures of the runs, and those that a line over the logarithm of the tokens predicts."""
    if len(options.runs) < 2:
        raise UserError("a line needs two runs: name two directories or more")
    records = list(map(last_record, options.runs))
    predicted: dict[str, Any] = {"data": PREDICTED / 1e6, "seen": "predicted"}
    x = np.log([record["data"] for record in records])
    for name in SETTINGS:
        line = np.polyfit(x, [record[f"passes_{name}"] for record in records], 1)
        predicted |= {f"first_{name}": "", f"passes_{name}": float(np.polyval(line, np.log(PREDICTED / 1e6)))}
    publish(options, "head-data", COLUMNS, [*records, predicted])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("runs", nargs="+", metavar="TOKENS=DIRECTORY")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
