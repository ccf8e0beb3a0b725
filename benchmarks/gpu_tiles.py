"""Tiles of the kernels of few rows: measure candidates on this machine's GPU and keep the best.

Part of `benchmarks.gpu_check --tune FILE`.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specdemo.models.engines import row_linear
from specdemo.models.engines.row_linear import CODE4, FLOAT, INT8, RowLinear, Tiles, float_linear

MATRICES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)}
ROTATED_BYTES = 200 << 20  # more than the cache of the GPU
LAUNCHES = 24  # of a graph
BLOCKS = {CODE4: (4,), INT8: (2, 4), FLOAT: (1, 2)}
SHAPES = ((64, 4), (128, 4), (128, 8), (256, 8))  # outputs and warps
STAGES, PROGRAMS = (2, 3, 4), (264, 528)
COMPILERS = 12


def candidates(form: str) -> Iterator[Tiles]:
    for (outputs, warps), blocks, stages, programs in product(SHAPES, BLOCKS[form], STAGES, PROGRAMS):
        yield Tiles(outputs, blocks, programs, warps, stages)


def matrix(form: str, outputs: int, inputs: int) -> RowLinear:
    from benchmarks.gpu_check import quantised

    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
    return float_linear(weight, None) if form == FLOAT else quantised(weight, {CODE4: "nf4", INT8: "int8"}[form])


def copies(linear: RowLinear) -> list[RowLinear]:
    """Return copies that the cache of the GPU cannot hold together."""
    count = max(2, min(LAUNCHES, ROTATED_BYTES // linear.weight.nbytes))
    tensors = [{name: tensor.clone() for name, tensor in linear.tensors.items()} for _ in range(count)]
    return [RowLinear(linear.form, part, linear.in_features, linear.dtype) for part in tensors]


def launch_seconds(launch: object, linears: list[RowLinear]) -> float:
    """Return the seconds of a launch in a graph of launches over all copies."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(linears[0])
        with torch.cuda.graph(graph, stream=stream):
            for i in range(LAUNCHES):
                launch(linears[i % len(linears)])
        graph.replay()
        times = []
        for _ in range(5):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record(stream)
            graph.replay()
            last.record(stream)
            last.synchronize()
            times.append(first.elapsed_time(last) / 1000 / LAUNCHES)
    return statistics.median(times)


def check(form: str) -> str:
    """Compare products with float64, and their bits for each number of rows."""
    linear = matrix(form, 4096 - 8, 4096)
    rows = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")
    expected = rows.double() @ linear.expanded().double().T
    found = linear(rows)
    equal = all(torch.equal(linear(rows[:n]), found[:n]) for n in range(1, 17))
    return f"{form}: error {float((found.double() - expected).norm() / expected.norm()):.1e}, equal bits {equal}"


def compiled(linear: RowLinear, rows: Tensor, tiles: list[Tiles]) -> dict[Tiles, str]:
    """Compile candidates, several at a time; return the failures."""
    failures = {}

    def one(choice: Tiles) -> None:
        try:
            linear.partial_sums(rows, choice)
            torch.cuda.synchronize()
        except Exception as error:
            failures[choice] = f"{type(error).__name__}: {str(error)[:200]}"

    distinct = {(t.outputs, t.blocks, t.warps, t.stages): t for t in tiles}
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(one, distinct.values()))
    return failures


def measured(form: str, rows_of: tuple[int, ...]) -> Tiles:
    """Print times of all candidates and matrices; return the fastest for a layer."""
    layer: dict[Tiles, float] = {}
    every = list(candidates(form))
    for name, (outputs, inputs) in MATRICES.items():
        linears = copies(matrix(form, outputs, inputs))
        size = sum(tensor.nbytes for tensor in linears[0].tensors.values())
        for count in rows_of:
            rows = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda")
            if failures := compiled(linears[0], rows, every):
                print(f"  {len(failures)} candidates failed: {next(iter(failures.items()))}", flush=True)
            every = [tiles for tiles in every if tiles not in failures]
            times = {}
            for tiles in every:
                try:
                    times[tiles] = launch_seconds(lambda linear, t=tiles: linear.partial_sums(rows, t), linears)
                    layer[tiles] = layer.get(tiles, 0) + times[tiles]
                except Exception:
                    traceback.print_exc()
            for tiles in sorted(times, key=times.__getitem__)[:3]:
                print(f"  {form} {name} {count} rows: {1e6 * times[tiles]:.1f} us, {size / times[tiles] / 1e9:.0f} GB/s, {tiles}")
            if form == FLOAT:
                other = launch_seconds(lambda linear: F.linear(rows, linear.weight), linears)
                print(f"  {form} {name} {count} rows: {1e6 * other:.1f} us, {size / other / 1e9:.0f} GB/s, cuBLAS", flush=True)
    best = sorted(layer, key=layer.__getitem__)
    for tiles in best[:6]:
        print(f"  {form} all matrices: {1e6 * layer[tiles]:.1f} us, {tiles}", flush=True)
    return best[0]


def chosen_tiles(path: str) -> None:
    """Measure all forms and write the fastest tiles."""
    chosen = {}
    for form in (CODE4, INT8, FLOAT):
        try:
            print(f"[{time.strftime('%H:%M:%S')}] tiles of {form}: {check(form)}", flush=True)
            chosen[form] = asdict(measured(form, (1,)))
            torch.cuda.empty_cache()
        except Exception:
            traceback.print_exc()
        Path(path).write_text(json.dumps(chosen, indent=1))


def use_tiles(path: str) -> None:
    """Use the tiles of a file in this process."""
    found = {form: Tiles(**values) for form, values in json.loads(Path(path).read_text()).items()}
    row_linear.TILES[torch.cuda.get_device_capability()] = row_linear.TILES[0, 0] | found
