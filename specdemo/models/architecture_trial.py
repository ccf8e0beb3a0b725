"""Trial of the configuration of an architecture without a schema, in a process with limits."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from specdemo.core.errors import UserError
from specdemo.models.limited_process import LimitedProcess, serve

_SECONDS = 120.0
_CPU_SECONDS, _MAX_BYTES = 6, 16 << 30
_MOST_BYTES = 1 << 30  # memory of a model without weights
_PROCESS = LimitedProcess(__name__)


def try_architecture(name: str, folder: Path) -> None:
    """Raise `UserError` if a configuration needs too much time or memory; its other errors are raised by its use."""
    if problem := _problem(name, folder, (folder / "config.json").stat().st_mtime_ns):
        raise UserError(problem)


@lru_cache(maxsize=64)
def _problem(name: str, folder: Path, changed: int) -> str:
    return _PROCESS.problem(str(folder), _SECONDS, f"the configuration of {name}", "choose another model")


def _build(folder: str) -> None:
    from transformers import AutoConfig

    from specdemo.models.memory import is_out_of_memory, peak_process_bytes
    from specdemo.models.quantization import skeleton

    before = peak_process_bytes()
    try:
        skeleton(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, RecursionError):
            raise
    if (used := peak_process_bytes() - before) > _MOST_BYTES:
        raise MemoryError(f"{used:,} bytes")


if __name__ == "__main__":
    import transformers.modeling_utils  # noqa: F401  # before the forks

    import specdemo.models.quantization  # noqa: F401

    serve(_build, _CPU_SECONDS, _MAX_BYTES)
