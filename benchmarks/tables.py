"""Command line of the studies, the tables they print and write into the documents, and the command of each table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from specdemo.bench.table import markdown_table
from specdemo.cli.arguments import Parser, add_model_options, positive
from specdemo.core.errors import UserError
from specdemo.native.build import NativeUnavailable, native_library

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Study:
    """Measurement of a module.

    A value of `options` is a default, a list of defaults, or the keywords of `add_argument`; `models` adds the options
    that select and load models.
    """

    measure: Callable[[argparse.Namespace], object]
    options: Mapping[str, Any] = field(default_factory=dict)
    models: bool = False


def add_options(parser: Parser, tables: Mapping[str, str], study: Study) -> None:
    """Add the flags of a study, and `--write`, which replaces tables in the documents of `tables`."""
    parser.set_defaults(measure=study.measure)
    if tables:
        documents = ", ".join(dict.fromkeys(tables.values()))
        parser.add_argument("--write", action="store_true", help=f"replace the tables in {documents}")
    for name, value in study.options.items():
        keywords = value
        if not isinstance(value, dict):
            several = isinstance(value, list)
            kind = type(value[0] if several else value)
            keywords = {"type": positive if kind is int else kind, "help": "(default: %(default)s)"}
            keywords |= {"default": value, "nargs": "+" if several else None}
        parser.add_argument("--" + name.replace("_", "-"), **keywords)
    if study.models:
        add_model_options(parser)


def study_command(
    script: str, description: str | None, tables: Mapping[str, str], studies: Mapping[str, Study] | Study
) -> Callable[[Sequence[str] | None], int]:
    """Return the `main` of the module `script` (its `__file__`): a study, or a command per study.

    The first paragraph of the docstring is its help. `tables` maps the names of its tables to documents, relative to
    the checkout; all commands have `--write` if there are tables.
    """
    path = Path(script)
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.parent.name, path.name)
    parser = Parser(
        prog=f"python -m {'.'.join(name.with_suffix('').parts)}", description=(description or "").split("\n\n")[0]
    )
    parser.set_defaults(tables=tables, write=False)
    if isinstance(studies, Study):
        add_options(parser, tables, studies)
    else:
        commands = parser.add_subparsers(required=True, metavar="STUDY", parser_class=Parser)
        for title, study in studies.items():
            summary = (study.measure.__doc__ or "").split("\n\n")[0]
            command = commands.add_parser(title, help=summary.replace("%", "%%"), description=summary)
            add_options(command, tables, study)
    return lambda arguments=None: run_study(parser, arguments)


def run_study(parser: Parser, arguments: Sequence[str] | None) -> int:
    """Run the chosen study with the parsed options and return the exit code: 2 after a `UserError`."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    variables = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "SPECDEMO_VECTORS")}
    words = [*parser.prog.split(), *(word for word in given if word != "--write")]
    prefix = [f"{name}={value}" for name, value in variables.items() if value]
    options.command = shlex.join([*prefix, *words])
    try:
        return int(options.measure(options) or 0)
    except UserError as error:
        print(f"specdemo: {error}", file=sys.stderr)
        return 2


def publish(
    options: argparse.Namespace, name: str, columns: Mapping[str, str], records: Sequence[Mapping[str, Any]]
) -> None:
    """Print `records` as a table and as a JSON line; with `--write` replace the table `name` in its document.

    `columns` maps headings to templates for `str.format`, filled from a record.
    """
    table = markdown_table(list(columns), [[cell.format(**record) for cell in columns.values()] for record in records])
    print(table, flush=True)
    print(json.dumps({name: list(records)}))
    if options.write:
        write_table(ROOT / options.tables[name], name, f"`{options.command}` ({conditions()})", table)


def write_table(document: Path, name: str, source: str, table: str) -> None:
    """Write a table below its source between the markers `<!-- begin: name -->` and `<!-- end: name -->`."""
    compact = re.sub(r"-{4,}", "---", re.sub(" {2,}", " ", table))
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    text = document.read_text("utf-8")
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed or begin in after:
        raise UserError(f"{document.name} needs the lines {begin} and {end} exactly once: add them and repeat --write")
    document.write_text(f"{before}{begin}\n{source}:\n\n{compact}\n{end}{after}", "utf-8")


def publish_width(
    options: argparse.Namespace, name: str, columns: Mapping[str, str], records: Sequence[Mapping[str, Any]]
) -> None:
    """Publish the table `name` of the vectors in use, which `SPECDEMO_VECTORS` selects."""
    publish(options, f"{name}-{vectors().split()[0]}", columns, records)


def vectors() -> str:
    """Return the vector extensions of the native engine, "torch" without it."""
    library = native_library()
    return "torch" if isinstance(library, NativeUnavailable) else library.vector_extensions().decode()


def conditions() -> str:
    """Return device, cores, vector extensions of the native engine, torch version, date and commit."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    processor = re.sub(r"\(\w+\)| Processor", "", name[1]) if name else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    extensions = [] if vectors() == "torch" else [vectors()]
    software = [f"torch {torch.__version__}", f"{date.today():%Y-%m-%d}", *commit()]
    return ", ".join([processor, f"{cores} cores", *extensions, *devices, *software])


def commit() -> list[str]:
    """Return the commit of the program, in words; nothing without git."""
    try:
        head, changed = (
            subprocess.run(["git", *command.split()], cwd=ROOT, check=True, capture_output=True, text=True).stdout
            for command in ("rev-parse --short HEAD", "status --porcelain --untracked-files=no *.py *.c *.h")
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return [f"commit {head.strip()}" + (" with changes" if changed else "")]


WIDTHS = ("avx512", "avx2")


def per_width(*tables: str) -> tuple[str, ...]:
    """Return the names of tables that are measured with each width of vectors, see `SPECDEMO_VECTORS`."""
    return tuple(f"{table}-{width}" for table in tables for width in WIDTHS)


@dataclass(frozen=True)
class TableRun:
    """Command that writes `tables`, and its minutes on two idle cores."""

    command: str
    tables: tuple[str, ...]
    minutes: float

    @property
    def module(self) -> str:
        return self.command.partition(" -m ")[2].split()[0]


RUNS = (
    TableRun(
        "python -m benchmarks.document_tables --write",
        ("bench", "bench-classes", "bench-costs", "bench-readme", "bench-policies", "bench-transformers", "prove"),
        15,
    ),
    TableRun(
        "python -m benchmarks.document_tables --table chat-readme --prompts 10 --write",
        (*per_width("bench-chat"), "chat-readme"),
        5,
    ),
    TableRun(
        "python -m benchmarks.document_tables --table bench-questions-avx512 --questions mt-bench.jsonl "
        "spec-bench.jsonl --repeat 2 --write",
        per_width("bench-questions"),
        20,
    ),
    TableRun("python -m benchmarks.chat_model --write", ("drafters",), 3),
    TableRun("python -m benchmarks.native_passes passes --write", per_width("native_passes"), 2),
    TableRun("python -m benchmarks.native_passes stages --write", per_width("native_stages"), 0.5),
    TableRun("python -m benchmarks.native_passes texts --write", per_width("several_texts"), 0.5),
    TableRun(
        "python -m training.head.baseline --prompts mt-bench.jsonl spec-bench.jsonl natural.jsonl "
        "--results results.jsonl --write",
        ("head-baseline",),
        20,
    ),
    TableRun("python -m benchmarks.document_tables --table engine-figures --write", ("engine-figures",), 0.1),
    TableRun("python -m benchmarks.native_passes steps --write", ("time_breakdown",), 0.5),
    TableRun("OMP_NUM_THREADS=1 python -m benchmarks.document_tables --table memory --write", ("memory",), 3),
    TableRun(
        "python -m benchmarks.against_llama_cpp --llama-server PATH --ik-llama-server PATH --questions mt-bench.jsonl "
        "spec-bench.jsonl --write",
        ("against_llama_cpp-prompts",),
        15,
    ),
    TableRun("python -m benchmarks.imposed_acceptance --write", ("imposed_acceptance",), 5),
    TableRun("python -m benchmarks.preflight_accuracy --write", ("preflight_accuracy",), 5),
    TableRun(
        "OMP_NUM_THREADS=1 python -m benchmarks.preflight_accuracy --tokens-per-pass --temperature 0 0.3 0.7 1 --write",
        ("preflight_tokens",),
        5,
    ),
    TableRun("python -m benchmarks.gpu_check --write", ("gpu_check",), 8),
    TableRun("OMP_NUM_THREADS=1 python -m benchmarks.edge_cloud gates --write", ("gates",), 2),
    TableRun("OMP_NUM_THREADS=1 python -m benchmarks.edge_cloud link --write", ("link",), 6),
    TableRun("OMP_NUM_THREADS=1 python -m benchmarks.edge_cloud traffic --write", ("traffic",), 0.5),
    TableRun("OMP_NUM_THREADS=1 python -m benchmarks.edge_cloud modes --write", ("modes",), 1),
    TableRun(
        "python -m benchmarks.page_cost speed --tokens 1000 --rounds 10 --write", ("page_cost", "page_cost-cpu"), 4
    ),
    TableRun("python -m benchmarks.page_cost starts --write", ("page_cost-startup",), 1),
    TableRun(
        "python -m benchmarks.page_cost speed --tokens 1000 --rounds 6 --remote --write", ("page_cost-remote",), 2
    ),
    TableRun("python -m benchmarks.page_cost frames --write", ("page_frames",), 3),
)
