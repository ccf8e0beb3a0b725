"""Runs and models of the studies: complete traces, the cloud service in another process, totals, random weights."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.tables import ROOT
from specdemo.core.errors import UserError
from specdemo.core.events import End, Header, Loading, StepEvent
from specdemo.core.trace import to_json
from specdemo.generate import generate
from specdemo.models.chat_prompt import PromptOrChat
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe

T = TypeVar("T")


@dataclass(frozen=True)
class Trace:
    """Events of a run: header, steps and end."""

    header: Header
    steps: list[StepEvent]
    end: End

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.steps for token in event.step.tokens]

    @property
    def metrics(self) -> dict[str, Any]:
        return to_json(self.end)["metrics"]


def traced(recipe: Recipe, prompt: PromptOrChat, pool: ModelPool, pause_s: float = 0.0, **parts: Any) -> Trace:
    """Run `recipe` to its end, with `parts` for `generate` and pauses. Raises `RuntimeError` if the run fails."""
    trace = possibly_failed(recipe, prompt, pool, pause_s, **parts)
    if trace.end.error:
        raise RuntimeError(trace.end.error)
    return trace


def possibly_failed(recipe: Recipe, prompt: PromptOrChat, pool: ModelPool, pause_s: float = 0.0, **parts: Any) -> Trace:
    """Run `recipe` to its end or first error, sleeping `pause_s` after each step."""
    events: list[Any] = []
    for event in generate(recipe, prompt, pool, **parts):
        if not isinstance(event, Loading):
            events.append(event)
            time.sleep(pause_s)
    header, *steps, end = events
    return Trace(header, steps, end)


def in_new_process(function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function of a module that a new process imports."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


class Service:
    """A cloud service in a process, which may be replaced at its port."""

    def __init__(self, *options: str) -> None:
        self._options, self.url = options, "http://127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Start the process; `url` is its address."""
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", "specdemo", "serve", "--port", port, *self._options]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().removeprefix("listening on ").strip()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def cloud_service(*options: str) -> Iterator[Service]:
    """Run the service of the bundled pair with `options` on a free local port."""
    with closing(Service("--pair", "bundled", *options)) as service:
        yield service


@dataclass(frozen=True)
class StepTotals:
    """Totals over the steps of some runs, without the prefill."""

    tokens: int
    drafted: tuple[int, ...]  # per step
    betas: tuple[float, ...]  # per tested token
    draft_s: float
    cloud_s: float
    link_s: float  # from request to response, without the cloud's time
    host_s: float
    bytes_up: float
    bytes_down: float
    rows: float

    @property
    def steps(self) -> int:
        return len(self.drafted)

    @property
    def gamma(self) -> float:
        return sum(self.drafted) / self.steps

    @property
    def alpha(self) -> float:
        """Mean of beta; 0 if no token was tested."""
        return statistics.mean(self.betas) if self.betas else 0.0

    @property
    def step_s(self) -> float:
        return (self.draft_s + self.cloud_s + self.link_s + self.host_s) / self.steps


def step_totals(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool, pause_s: float = 0.0) -> StepTotals:
    """Run an edge-cloud recipe on every prompt with pauses of `pause_s` between steps, excluded from all figures."""
    steps = [event.step for prompt in prompts for event in traced(recipe, prompt.text, pool, pause_s).steps[1:]]
    links = [step.verdict.remote for step in steps]
    cloud_s = sum(link["cloud_s"] for link in links)
    return StepTotals(
        sum(len(step.tokens) for step in steps),
        tuple(len(step.draft) for step in steps),
        tuple(beta for step in steps for beta in step.betas),
        sum(step.seconds.draft for step in steps),
        cloud_s,
        sum(step.seconds.verify for step in steps) - cloud_s,
        sum(step.seconds.host for step in steps),
        *(sum(link[name] for link in links) for name in ("bytes_up", "bytes_down", "rows")),
    )


def _llama(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
    }


SHAPES = {
    "llama-300m": _llama(1280, 3840, 16, 20, tied=False),
    "llama-30m": _llama(512, 1536, 8, 8, tied=True),
}


def save_random(shape: dict[str, Any], folder: Path) -> None:
    """Save a model with random weights and the bundled tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(PAIRS["bundled"].target).save_pretrained(folder)


def save_dequantised(folder: Path) -> None:
    """Write the chat model as a checkpoint in float32. Raises `UserError` if it is not installed."""
    if PAIRS[CHAT_PAIR].missing:
        raise UserError(f"the chat model is not installed: {PAIRS[CHAT_PAIR].missing}")
    file = Path(PAIRS[CHAT_PAIR].target)
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del read.config.quantization_config  # otherwise it cannot be saved
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
