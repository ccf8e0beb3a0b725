"""A large pair without a download: ``python -m benchmarks.large_pair``, for machines with a GPU.

The shapes are published ones, the weights random, so every pass costs what the real models' passes cost. What random
weights cannot give is agreement: the drafter's passes are made and then its tokens are replaced by the target's own
greedy text, with errors at a given rate. So acceptance is imposed, and everything else measured.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.random_models import SHAPES, save_random
from specdemo.bench.measure import copy_bandwidth
from specdemo.core.decode import DraftBudget, Drafter, EmptyDrafter, decode
from specdemo.core.metrics import Metrics
from specdemo.core.policies import Fixed
from specdemo.core.rules import rejection
from specdemo.core.sampling import Noise, SamplingParams
from specdemo.core.step import Draft, Step
from specdemo.core.verifier import ModelVerifier
from specdemo.models.engines.llama_weights import LlamaWeights
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel, load
from specdemo.models.memory import peak_device_bytes
from specdemo.models.spec import ModelSpec, find_device
from specdemo.models.zoo import PAIRS

PROMPT = tuple(range(5, 133))


@dataclass(frozen=True)
class Point:
    """One way to decode; times in seconds."""

    quantization: str
    graphs: bool
    gamma: int  # 0: plain
    right: float  # imposed rate of right drafts
    tokens_per_second: float
    speedup: float
    tokens_per_pass: float
    draft_s: float  # per drafted token
    verify_s: float  # per round
    host_s: float  # per round
    bandwidth: float  # bytes of weights read per second, over the copy bandwidth of the device


class Imposed:
    """A drafter whose passes are real and whose tokens are those of `text`, but for errors."""

    def __init__(
        self, score: Callable[[Sequence[int], Draft], Tensor], text: Sequence[int], right: float, seed: int = 0
    ) -> None:
        self._score, self._text, self._right = score, text, right
        self._rng = random.Random(seed)

    def propose(self, tokens: Sequence[int], budget: DraftBudget) -> Draft:
        """A chain; each token is the text's with probability `right`."""
        path = list(tokens)
        while budget.may_extend(len(path) - len(tokens), None):
            own = int(self._score(path, Draft())[0].argmax())  # waits for the pass as a drafter must
            best = self._text[len(path)] if len(path) < len(self._text) else own
            path.append(best if self._rng.random() < self._right else (best + 1) % 1000)
        return Draft.chain(tuple(path[len(tokens) :]))

    def observe(self, step: Step) -> None:
        """Nothing to learn."""


def measure(
    target: LoadedModel, drafter: LoadedModel, gammas: Sequence[int], rates: Sequence[float], tokens: int
) -> Iterator[Point]:
    """Plain decoding, then every gamma and rate; with graphs and without where the device has them."""
    bandwidth = copy_bandwidth(target.model.device)
    for graphs in (False, True) if isinstance(target.model, LlamaWeights) and target.model.recordable else (False,):
        for loaded in (target, drafter):
            if isinstance(loaded.model, LlamaWeights):
                loaded.model.graphs = graphs
                loaded.model.idle.clear()
        _run(target, EmptyDrafter(), 0, 8)
        text, plain = _run(target, EmptyDrafter(), 0, tokens)
        base = plain["tokens_per_second"]

        def point(gamma: int, right: float, m: dict, base: float = base, graphs: bool = graphs) -> Point:
            rounds = m["steps"] - 1
            read = target.weight_bytes * rounds + drafter.weight_bytes * m["drafted"]
            return Point(
                target.spec.quantization,
                graphs,
                gamma,
                right,
                m["tokens_per_second"],
                m["tokens_per_second"] / base,
                m["tokens_per_target_pass"],
                m["draft_s"] / max(m["drafted"], 1),
                m["verify_s"] / rounds,
                m["host_s"] / rounds,
                read / m["decode_s"] / bandwidth,
            )

        yield point(0, 0.0, plain)
        for gamma in gammas:
            for right in rates:

                def imposed(gamma: int = gamma, right: float = right, text: list[int] = text) -> dict:
                    drafts = Imposed(CachedModel(drafter.model).score, text, right)
                    ours, m = _run(target, drafts, gamma, tokens)
                    if ours != text:
                        print(f"gamma {gamma}: the text parts from plain decoding, as a near-tie fell the other way")
                    return m

                imposed()  # once to warm up
                yield point(gamma, right, imposed())


def _run(target: LoadedModel, drafter: Drafter, gamma: int, tokens: int) -> tuple[list[int], dict]:
    """The whole text and the figures of one greedy run."""
    sampling = SamplingParams(temperature=0)
    verifier = ModelVerifier(
        CachedModel(target.model).score, sampling, rejection, accept=Noise(0, "accept"), correct=Noise(0, "correct")
    )
    metrics, text = Metrics(), list(PROMPT)
    for step in decode(PROMPT, verifier, drafter, Fixed(gamma), max_tokens=tokens, stop=(), clock=time.perf_counter):
        metrics = metrics.plus(step)
        text += step.tokens
    return text, metrics.as_dict()


def markdown(points: Sequence[Point]) -> str:
    """A table for people; times in milliseconds."""
    names = list(asdict(points[0]))
    rows = [
        [
            f"{1000 * value:.2f}" if name.endswith("_s") else f"{value:.2f}" if isinstance(value, float) else str(value)
            for name, value in asdict(point).items()
        ]
        for point in points
    ]
    head = [name.replace("_s", " ms") if name.endswith("_s") else name.replace("_", " ") for name in names]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(names), *rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the models, measure, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_pair", description=__doc__)
    parser.add_argument("--target", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--drafter", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--quantization", nargs="+", choices=("none", "int8", "nf4"), default=["none", "nf4"])
    parser.add_argument("--gamma", nargs="+", type=int, default=[2, 4, 6])
    parser.add_argument("--right", nargs="+", type=float, default=[0.6, 0.8, 0.9], help="rates of right drafts")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as place:
        folders = {role: Path(place, role) for role in ("target", "drafter")}
        for role, folder in folders.items():
            shape = getattr(options, role)
            save_random(shape, folder, PAIRS["bundled"].target, getattr(torch, options.dtype), device)
        for quantization in options.quantization:
            specs = [ModelSpec(str(folder), options.dtype, quantization, options.device) for folder in folders.values()]
            target, drafter = (load(spec) for spec in specs)
            points += measure(target, drafter, options.gamma, options.right, options.tokens)
            peak = peak_device_bytes(device)
            sizes = f"target {target.weight_bytes / 1e9:.2f} GB, drafter {drafter.weight_bytes / 1e9:.2f} GB"
            print(f"{quantization}: {sizes}" + (f", peak {peak / 1e9:.2f} GB" if peak else ""))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(f"{options.target} with {options.drafter} in {options.dtype} on {where}; rates of right drafts are imposed")
    print(markdown(points))


if __name__ == "__main__":
    main()
