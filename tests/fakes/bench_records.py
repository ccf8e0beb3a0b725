"""Benchmark records written by hand."""

from typing import Any


def run(wall: float, drafted: int = 0, text: tuple[int, ...] = (1, 2), **changes: Any) -> dict[str, Any]:
    """Ten steps after the prefill: 0.2 s of drafting, 0.7 s of verification, 0.1 s of host time."""
    return {
        "text": list(text),
        "decode_tokens": 20 if drafted else 10,
        "wall_s": wall,
        "tokens_per_second": 1.0,
        "steps": 11,
        "draft_s": 0.2 if drafted else 0.0,
        "verify_s": 0.7,
        "host_s": 0.1,
        "drafted": drafted,
        "acceptance_rate": 0.5 if drafted else None,
        "alpha": 0.55 if drafted else None,
        "mean_beta": 0.6 if drafted else None,
        "tokens_per_step": 2.0 if drafted else 1.0,
        "tokens_per_target_pass": 2.0 if drafted else 1.0,
        "ttft_s": 0.1,
        "bytes_read": 100.0,
        "held_bytes": 5e6,
        **changes,
    }
