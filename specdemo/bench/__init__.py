"""Recipes x prompts, paired and alternating in one process: a table for people, one JSON line for machines."""

from specdemo.bench.measure import Prompt, Turn, copy_bandwidth, grid, label, load_prompts, measure
from specdemo.bench.progress import Progress
from specdemo.bench.report import disturbed, report, slower
from specdemo.bench.table import Row, as_json, markdown, table
from specdemo.bench.written import load_written

__all__ = [
    "Progress",
    "Prompt",
    "Row",
    "Turn",
    "as_json",
    "copy_bandwidth",
    "disturbed",
    "grid",
    "label",
    "load_prompts",
    "load_written",
    "markdown",
    "measure",
    "report",
    "slower",
    "table",
]
