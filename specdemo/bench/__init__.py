"""Recipes x prompts, paired and alternating in one process: a table for people, one JSON line for machines."""

from specdemo.bench.measure import Prompt, copy_bandwidth, label, load_prompts, measure
from specdemo.bench.table import Row, as_json, markdown, table

__all__ = ["Prompt", "Row", "as_json", "copy_bandwidth", "label", "load_prompts", "markdown", "measure", "table"]
