"""Trial of the configuration of an architecture without a schema, in a process with limits."""

from __future__ import annotations

from pathlib import Path

from specdemo.models.limited_process import LimitedProcess, serve

_SECONDS = 120.0
_CPU_SECONDS, _MAX_BYTES = 6, 16 << 30
_MOST_BYTES = 1 << 30  # memory of a model without weights
_PROCESS = LimitedProcess(__name__)


def try_architecture(name: str, folder: Path) -> None:
    """Raise `UserError` if a configuration needs too much time or memory; its other errors are raised by its use."""
    _PROCESS.try_file(folder / "config.json", (str(folder),), _SECONDS, f"the configuration of {name}")


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

    serve(lambda request: _build(*request), _CPU_SECONDS, _MAX_BYTES)
