"""Commands that write the measured tables of docs/ and README.md."""

from __future__ import annotations

from dataclasses import dataclass

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
        """Name of the module that the command runs."""
        return self.command.partition(" -m ")[2].split()[0]


RUNS = (
    TableRun(
        "python -m benchmarks.document_tables --write",
        ("bench", "bench-classes", "bench-costs", "bench-readme", "bench-policies"),
        10,
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
    TableRun("python -m benchmarks.engine_figures --write", ("engine-figures",), 0.1),
    TableRun(
        "python -m benchmarks.against_llama_cpp --llama-server PATH --questions mt-bench.jsonl spec-bench.jsonl "
        "--write",
        ("against_llama_cpp-prompts",),
        15,
    ),
    TableRun("python -m benchmarks.preflight_accuracy --write", ("preflight_accuracy",), 5),
    TableRun("python -m benchmarks.gpu_check --write", ("gpu_check",), 8),
    TableRun("OMP_NUM_THREADS=1 python -m benchmarks.edge_cloud gates --write", ("gates",), 2),
    TableRun("OMP_NUM_THREADS=1 python -m benchmarks.edge_cloud modes --write", ("modes",), 1),
    TableRun("python -m benchmarks.page_cost frames --write", ("page_frames",), 3),
)
