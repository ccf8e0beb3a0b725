"""Paired benchmarks of recipes x prompts, alternating in a process."""

from specdemo.bench.measure import BenchProgress, copy_bandwidth, grid, measure, recipe_label
from specdemo.bench.table import (
    BenchRow,
    Progress,
    as_json,
    disturbed,
    markdown,
    markdown_table,
    report,
    run_speed,
    slower,
    table,
)

__all__ = [
    "BenchProgress",
    "BenchRow",
    "Progress",
    "as_json",
    "copy_bandwidth",
    "disturbed",
    "grid",
    "markdown",
    "markdown_table",
    "measure",
    "recipe_label",
    "report",
    "run_speed",
    "slower",
    "table",
]
