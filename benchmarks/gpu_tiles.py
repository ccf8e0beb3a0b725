"""Tiles of the kernels of few rows: measure candidates on this machine's GPU and keep the best.

Part of `benchmarks.gpu_check --tune FILE`.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

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


def launch_seconds(launch: Callable[[RowLinear], object], linears: list[RowLinear]) -> float:
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


def compiled(linear: RowLinear, rows: Tensor) -> list[Tiles]:
    """Compile the candidates, several at a time; return those that run."""

    def failure(choice: Tiles) -> str:
        try:
            linear.partial_sums(rows, choice)
            torch.cuda.synchronize()
        except Exception as error:  # of Triton's compiler, or too much shared memory
            return f"{type(error).__name__}: {str(error)[:200]}"
        return ""

    every = list(candidates(linear.form))
    distinct = [tiles for tiles in every if tiles.programs == PROGRAMS[0]]
    with ThreadPoolExecutor(COMPILERS) as pool:
        failures = dict(zip(distinct, pool.map(failure, distinct), strict=True))
    for tiles, text in failures.items():
        if text:
            print(f"  {tiles}: {text}")
    return [tiles for tiles in every if not failures[replace(tiles, programs=PROGRAMS[0])]]


def measured(form: str) -> Tiles:
    """Print the fastest candidates of each matrix; return that of a layer."""
    layer: dict[Tiles, float] = {}
    for name, (outputs, inputs) in MATRICES.items():
        linears = copies(matrix(form, outputs, inputs))
        size = sum(tensor.nbytes for tensor in linears[0].tensors.values())
        rows = torch.randn(1, inputs, dtype=torch.bfloat16, device="cuda")
        times: dict[Any, float] = {}
        for tiles in compiled(linears[0], rows):
            times[tiles] = launch_seconds(partial(RowLinear.partial_sums, rows=rows, tiles=tiles), linears)
            layer[tiles] = layer.get(tiles, 0) + times[tiles]
        times["cuBLAS"] = launch_seconds(partial(_library_product, rows), linears) if form == FLOAT else float("inf")
        for choice in [*sorted(times, key=times.__getitem__)[:3], "cuBLAS"]:
            print(f"  {form} {name}: {1e6 * times[choice]:.1f} us, {size / times[choice] / 1e9:.0f} GB/s, {choice}")
    best = sorted(layer, key=layer.__getitem__)
    for tiles in best[:6]:
        print(f"  {form} all matrices: {1e6 * layer[tiles]:.1f} us, {tiles}", flush=True)
    return best[0]


def _library_product(rows: Tensor, linear: RowLinear) -> Tensor:
    return F.linear(rows, linear.weight)


def chosen_tiles(path: str) -> None:
    """Measure all forms and write the fastest tiles."""
    chosen = {}
    for form in (CODE4, INT8, FLOAT):
        try:
            print(f"[{time.strftime('%H:%M:%S')}] tiles of {form}: {check(form)}", flush=True)
            chosen[form] = asdict(measured(form))
            torch.cuda.empty_cache()
        except Exception:
            traceback.print_exc()
        Path(path).write_text(json.dumps(chosen, indent=1))


def use_tiles(path: str) -> None:
    """Use the tiles of a file in this process."""
    found = {form: Tiles(**values) for form, values in json.loads(Path(path).read_text()).items()}
    row_linear.TILES[torch.cuda.get_device_capability()] = row_linear.TILES[0, 0] | found
