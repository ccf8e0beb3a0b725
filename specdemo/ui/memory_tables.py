"""Who holds how much memory, as tables in megabytes: a run, the machine, and what each pair would need.

What is of a run is from its trace; the rest is asked of the machine at the moment. Knows nothing of gradio.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from specdemo.models import memory
from specdemo.models.memory_plan import plan_spec
from specdemo.models.quantization import unavailable
from specdemo.models.spec import QUANTIZATIONS, ModelSpec, find_device
from specdemo.models.zoo import PAIRS, Pair, offers
from specdemo.ui.frames import Run
from specdemo.ui.labels import NOTHING, Lane, percent, title

CONTEXT = 1000  # tokens
NOTES = {
    "run": "Keys and values are those of all models of the run. The process is all that it has resident, Python, torch "
    "and every model included; its peak is since it began.",
    "pairs": "Planned from the configurations; no weights are loaded for it. The sum holds the working space of a pass "
    "too. Of pairs that are not on this machine the catalogue tells the sum alone.",
}


def of_run(run: Run | None) -> str:
    """What each lane of a run held, a column each."""
    lanes = [lane for lane in run.lanes.values() if lane.lines] if run else []
    if not lanes:
        return "<p>Nothing has run yet: press Run, and look again.</p>"
    columns = [_held(lane) for lane in lanes]
    rows = [[what, *(column[what] for column in columns)] for what in columns[0]]
    head = ["MB", *(title(lane.recipe) for lane in lanes)]
    return _table("latest run", head, [row for row in rows if set(row[1:]) != {NOTHING}], NOTES["run"])


def _held(lane: Lane) -> dict[str, str]:
    sizes = lane.lines[0]["environment"]
    steps = [line["memory"] for line in lane.lines if line.get("memory")]
    last = steps[-1] if steps else {}
    end = lane.lines[-1].get("metrics", {})

    def most(name: str) -> float | None:
        known = [one.get(name) for one in steps] + [end.get(f"peak_{name}")]
        return max((n for n in known if n is not None), default=None)

    kv = most("kv_bytes")
    return {
        "weights of the target": _mb(sizes.get("target_bytes")),
        "weights of the drafter": _mb(sizes.get("drafter_bytes")),
        "keys and values, at the last step": _mb(last.get("kv_bytes")),
        "keys and values, at most": _mb(kv),
        "their share of weights, keys and values": percent(
            kv / (lane.weights + kv) if lane.weights and kv is not None else None
        ),
        "process, at the last step": _mb(last.get("rss_bytes")),
        "process, at most": _mb(most("rss_bytes")),
        "tensors on the device, at the last step": _mb(last.get("device_bytes")),
        "tensors on the device, at most": _mb(most("device_bytes")),
    }


def of_machine(device: str) -> str:
    """What this process and the machine have in use, and what is left."""
    where, now = find_device(device), memory.process_bytes()
    free, total = memory.memory_limit(torch.device("cpu"))
    rows = [
        ["process, now", _mb(now)],
        ["process, at most since it began", _mb(max(now, memory.peak_process_bytes()))],
        ["system, available", _mb(free)],
        ["system, in all", _mb(total)],
    ]
    if where.type == "cuda":
        free, total = memory.memory_limit(where)
        name = torch.cuda.get_device_name(where)
        rows += [
            [f"{name}, tensors now", _mb(memory.device_bytes(where))],
            [f"{name}, tensors at most since the process began", _mb(memory.peak_device_bytes(where))],
            [f"{name}, reserved for tensors", _mb(memory.reserved_device_bytes(where))],
            [f"{name}, available", _mb(free)],
            [f"{name}, in all", _mb(total)],
        ]
    return _table("machine", ["in use and available", "MB"], rows, "")


def of_pairs(device: str, pairs: Mapping[str, Pair] = PAIRS) -> str:
    """What every pair would need with its target quantised in every way, and whether it fits into what is free.

    Of models that are not on this machine only what the catalogue says is known: they are not asked for.
    """
    where = find_device(device)
    free, _ = memory.memory_limit(where)
    known = {offer.name: offer.needs for offer in offers(device)}
    rows = []
    for name, pair in pairs.items():
        if Path(pair.target).is_dir() and Path(pair.drafter).is_dir():
            ways = [way for way in QUANTIZATIONS if unavailable(way, where) is None]
            rows += [_pair(pair, way, where, free) for way in ways]
        elif name in known:
            rows.append([pair.title, *[NOTHING] * 3, _mb(known[name]), f"{_fits(known[name], free)}; not downloaded"])
    head = ["MB", "target", "drafter", "KV for 1,000 tokens", "sum", "fits"]
    return _table("pairs", head, rows, f"{NOTES['pairs']} {_mb(free)} MB are free now.")


def _pair(pair: Pair, quantization: str, device: torch.device, free: int) -> list[str]:
    asked = [
        ModelSpec(pair.target, quantization=quantization, device=str(device)),
        ModelSpec(pair.drafter, device=str(device)),
    ]
    target, drafter = (plan_spec(spec.resolved(), CONTEXT) for spec in asked)
    how = "" if quantization == "none" else f" {quantization} and"
    total = target.total + drafter.total
    figures = (target.weights, drafter.weights, target.kv + drafter.kv, total)
    return [f"{pair.title}; target in{how} {target.spec.dtype}", *map(_mb, figures), _fits(total, free)]


def _fits(total: int, free: int) -> str:
    return "yes" if total <= free else f"no, by {_mb(total - free)}"


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    """HTML, in a box of its own that scrolls where it is too wide."""

    def cells(texts: Sequence[str], tag: str, attributes: str = "") -> str:
        return "".join(f"<{tag}{attributes}>{html.escape(text)}</{tag}>" for text in texts)

    heads, head_of_row = cells(head, "th", ' scope="col"'), ' scope="row"'
    body = "".join(f"<tr>{cells(row[:1], 'th', head_of_row)}{cells(row[1:], 'td')}</tr>" for row in rows)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div role="region" aria-label="{name}" tabindex="0">{table}</div>' + (f"<p>{note}</p>" if note else "")


def _mb(n: float | None) -> str:
    return NOTHING if n is None else f"{n / 1e6:,.1f}"
