"""Memory tab, in megabytes: a run (from its trace), the machine now, and each pair (planned)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gradio as gr
import torch

from specdemo.bench.table import markdown_table
from specdemo.core.errors import UserError
from specdemo.core.events import MemoryUse
from specdemo.core.formats import NOTHING, megabytes, percent
from specdemo.models import memory
from specdemo.models.heads import HeadPlan, plan_head, tap_count
from specdemo.models.hub import Hub
from specdemo.models.memory_plan import PLANNED_CONTEXT, plan_spec
from specdemo.models.quantization import unavailable
from specdemo.models.spec import QUANTIZATIONS, ModelSpec, find_device, is_gguf
from specdemo.models.zoo import PAIRS, Pair, offers
from specdemo.ui.frames import Run
from specdemo.ui.lane import Lane
from specdemo.ui.tabs.components import RunViews, escape_markdown

NOTES = {
    "run": "Keys and values include all models of the run. A store is measured at the end. The process includes "
    "Python, torch and every loaded model. Peaks of process and device are since its start.",
    "pairs": "Planned from the configurations, without loading weights. "
    "The sum includes the working memory of a pass. For pairs that are not downloaded, only the sum is available.",
}


def of_run(run: Run | None) -> str:
    lanes = [lane for lane in run.lanes.values() if lane.begun] if run else []
    if not lanes:
        return "No run available: press Run first."
    columns = [_lane_rows(lane) for lane in lanes]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    head = ["MB", *(escape_markdown(lane.title) for lane in lanes)]
    table = markdown_table(head, [row for row in rows if set(row[1:]) != {NOTHING}])
    return f"{table}\n\n{NOTES['run']}"


def _lane_rows(lane: Lane) -> dict[str, str]:
    uses = [event.memory for event in lane.steps]
    peaks = [*uses, *([lane.end.peak] if lane.end and lane.end.peak else [])]
    kv, process, device = (
        max((value for value in values if value is not None), default=None)
        for values in zip(*((use.kv, use.process, use.device) for use in peaks or [MemoryUse()]), strict=True)
    )
    return {
        "weights of the target": megabytes(lane.environment.get("target_bytes")),
        "weights of the drafter": megabytes(lane.environment.get("drafter_bytes")),
        "keys and values, last step": megabytes(lane.memory.kv),
        "keys and values, peak": megabytes(kv),
        "share of keys and values": percent(kv / (lane.weights + kv) if lane.weights and kv is not None else None),
        "store of n-grams or suffixes": megabytes(lane.end.peak.store if lane.end and lane.end.peak else None, 2),
        "process, last step": megabytes(lane.memory.process),
        "process, peak since start": megabytes(process),
        "tensors on the device, last step": megabytes(lane.memory.device),
        "tensors on the device, peak since start": megabytes(device),
    }


def of_machine(device: str) -> str:
    target, now = find_device(device), memory.process_bytes()
    free, total = memory.memory_limit(torch.device("cpu"))
    rows = [
        ["process, now", megabytes(now)],
        ["process, peak since start", megabytes(max(now, memory.peak_process_bytes()))],
        ["system, available", megabytes(free)],
        ["system, total", megabytes(total)],
    ]
    if target.type == "cuda":
        free, total = memory.memory_limit(target)
        name = torch.cuda.get_device_name(target)
        rows += [
            [f"{name}, tensors now", megabytes(memory.device_bytes(target))],
            [f"{name}, tensors, peak since start", megabytes(memory.peak_device_bytes(target))],
            [f"{name}, reserved for tensors", megabytes(torch.cuda.memory_reserved(target))],
            [f"{name}, available", megabytes(free)],
            [f"{name}, total", megabytes(total)],
        ]
    return markdown_table(["in use and available", "MB"], rows)


def of_pairs(device: str, pairs: Mapping[str, Pair] = PAIRS) -> str:
    """Return the memory required by every pair and target quantization, and if it fits into free memory.

    Pairs that are not downloaded use the catalogue's figure.
    """
    target = find_device(device)
    free, _ = memory.memory_limit(target)
    catalogue = {offer.name: offer.needs for offer in offers(device)}
    rows = []
    for name, pair in pairs.items():
        if pair.missing:
            continue
        if all(Path(model).exists() for model in (pair.target, pair.drafter, pair.head) if model):
            available = ["none"] if is_gguf(pair.target) else QUANTIZATIONS
            available = [quantization for quantization in available if unavailable(quantization, target) is None]
            rows += [_pair(pair, quantization, target, free) for quantization in available]
        elif name in catalogue:
            needs = catalogue[name]
            rows.append([pair.title, *[NOTHING] * 3, megabytes(needs), f"{_fits(needs, free)}; not downloaded"])
    head = ["MB", "target", "drafter", "KV for 1,000 tokens", "sum", "fits"]
    return f"{markdown_table(head, rows)}\n\n{NOTES['pairs']} {megabytes(free)} MB are free now."


def _pair(pair: Pair, quantization: str, device: torch.device, free: int) -> list[str]:
    hub = Hub()
    taps = tap_count(pair.head, hub) if pair.head else 0
    spec = ModelSpec(pair.target, quantization=quantization, device=str(device))
    plans = [target := plan_spec(spec.resolved(), PLANNED_CONTEXT, taps=taps)]
    if pair.drafter:
        plans.append(plan_spec(ModelSpec(pair.drafter, device=str(device)).resolved(), PLANNED_CONTEXT))
    head = plan_head(pair.head, target, hub) if pair.head else HeadPlan(0, 0)
    weights = "" if quantization == "none" else f"{quantization} and "
    weight_format = "GGUF" if is_gguf(pair.target) else f"{weights}{target.spec.dtype}"
    position = head.position + sum(plan.position for plan in plans)
    total = head.total(PLANNED_CONTEXT) + sum(plan.total for plan in plans)
    drafter_weights = head.weights + sum(plan.weights for plan in plans[1:]) or None
    figures = (target.weights, drafter_weights, PLANNED_CONTEXT * position, total)
    return [f"{pair.title}; target in {weight_format}", *map(megabytes, figures), _fits(total, free)]


def _fits(total: int, free: int) -> str:
    return "yes" if total <= free else f"no, by {megabytes(total - free)}"


def memory_tab(device: str, views: RunViews) -> None:
    refresh = gr.Button("Refresh", size="sm", scale=0, elem_id="memory-refresh")
    numbers = ["figures", "numbers"]
    tables = [gr.Markdown(elem_id=f"memory-{name}", elem_classes=numbers) for name in ("run", "machine", "pairs")]

    def measure(run: Run | None) -> tuple[str, str, str]:
        try:
            machine, pairs = of_machine(device), of_pairs(device)
        except UserError as error:
            machine, pairs = escape_markdown(str(error)), ""
        return (
            f"### Latest run\n{of_run(run)}",
            f"### This machine\n{machine}",
            f"### Memory required per pair\n{pairs}",
        )

    views.connect_run([refresh.click], measure, [], tables)
