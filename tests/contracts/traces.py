"""Golden traces: recorded runs, and the fields that are made constant before writing or comparing."""

import json
import math
from typing import Any

from .interfaces import TRACES, terminal

PROMPT = "abcabdabcabd"
COMMON = ("--device", "cpu", "--max-tokens", "12")
SEEDED = ("--seed", "3", "--top-p", "1")
GREEDY = (*SEEDED, "--temperature", "0")
SAMPLED = (*SEEDED, "--temperature", "0.7")
RUNS = {
    "draft": ("--method", "draft", "--gamma", "3", *SAMPLED),
    "nasd": ("--method", "nasd", *GREEDY),
    "suffix": ("--method", "suffix", *GREEDY),
    "hybrid": ("--method", "hybrid", *SAMPLED),
    "tree": ("--method", "tree", "--gamma", "3", "--tree-nodes", "6", "--tree-width", "2", *SAMPLED),
    "self": ("--method", "self", "--exit-layer", "3", *SAMPLED),
    "lookahead": ("--method", "lookahead", *GREEDY),
    "lookup": ("--method", "lookup", *GREEDY),
    "ar": ("--method", "ar", *GREEDY),
    "beam": ("--method", "beam", "--num-beams", "2"),
    "draft-coupled": ("--method", "draft", "--rule", "coupled", "--temperature", "1", "--seed", "5", "--top-p", "1"),
    "draft-egag": ("--method", "draft", "--policy", "egag", *SAMPLED),
    "draft-top": ("--method", "draft", "--gamma", "2", "--top", "4", *SAMPLED),
}
STEP_S = {"draft_s": 0.001, "verify_s": 0.002, "host_s": 0.0005}
END_S = {"ttft_s": 0.01, "decode_s": 0.1, "tokens_per_second": 100.0, **STEP_S}
DIGITS = 7


def golden_traces() -> dict[str, str]:
    """Lines of the golden traces by name; in the file, the name precedes them."""
    traces: dict[str, str] = {}
    for line in TRACES.read_text("utf-8").splitlines(keepends=True):
        if line.startswith('{"trace":'):
            name = json.loads(line)["trace"]
            traces[name] = ""
        else:
            traces[name] += line
    return traces


def record_all(models: tuple[str, str]) -> str:
    """Record all runs and return the content of the file of golden traces."""
    lines = [line for name, flags in RUNS.items() for line in ({"trace": name}, *record(models, flags))]
    return "".join(json.dumps(_rounded(line), separators=(",", ":")) + "\n" for line in lines)


def record(models: tuple[str, str], flags: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run once in the terminal and return the lines of the trace, fixed."""
    target, drafter = models
    code, out, err = terminal("run", PROMPT, "--json", "--target", target, "--drafter", drafter, *COMMON, *flags)
    assert code == 0, err
    return [_fixed(json.loads(line)) for line in out.splitlines()]


def _fixed(line: dict[str, Any]) -> dict[str, Any]:
    """Replace times, memory, versions and paths of the line by constants; the result is a valid trace line."""
    if "recipe" in line:
        line["recipe"] |= {"target": "target", "drafter": "drafter"}
        line["bit_equal"] = True  # measured on the machine
        line["environment"] = {key: _constant(value) for key, value in line["environment"].items()}
    elif "end" in line:
        line["metrics"] |= {key: END_S[key] for key in END_S if key in line["metrics"]}
        line["metrics"] |= {key: 1 for key in line["metrics"] if key.endswith("_bytes")}
    else:
        line |= {key: STEP_S[key] for key in STEP_S if key in line}
        line["t"] = round(0.01 * (line["i"] + 1), 2)
        line["memory"] = dict.fromkeys(line["memory"], 1)
    return line


def _constant(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _constant(one) for key, one in value.items()}
    if isinstance(value, (bool, list)) or value is None:
        return value
    return "x" if isinstance(value, str) else 1


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def differences(golden: Any, current: Any, path: str = "") -> list[str]:
    """Places where `current` lacks a key of `golden` or has another value. Further keys are allowed."""
    if isinstance(golden, dict) and isinstance(current, dict):
        found = [f"{path}.{key} is missing" for key in golden.keys() - current.keys()]
        common = sorted(golden.keys() & current.keys())
        return found + [one for key in common for one in differences(golden[key], current[key], f"{path}.{key}")]
    if isinstance(golden, list) and isinstance(current, list):
        if len(golden) != len(current):
            return [f"{path} has {len(current)} items, not {len(golden)}"]
        return [
            one
            for i, pair in enumerate(zip(golden, current, strict=True))
            for one in differences(*pair, f"{path}[{i}]")
        ]
    if isinstance(golden, float) and isinstance(current, (int, float)):
        equal = math.isclose(golden, current, rel_tol=1e-4, abs_tol=1e-9)
    else:
        equal = type(golden) is type(current) and golden == current
    return [] if equal else [f"{path} is {current!r}, not {golden!r}"]
