"""Recipes x prompts, paired and alternating in one process: a table for people, one JSON line for machines."""

from specdemo.bench.measure import BenchProgress, copy_bandwidth, grid, measure, recipe_label
from specdemo.bench.progress import Progress
from specdemo.bench.report import disturbed, report, slower
from specdemo.bench.table import Row, as_json, markdown, table

__all__ = [
    "Progress",
    "Row",
    "BenchProgress",
    "as_json",
    "copy_bandwidth",
    "disturbed",
    "grid",
    "recipe_label",
    "markdown",
    "measure",
    "report",
    "slower",
    "table",
]
