"""Endurance of page and services: table `endurance` (docs/reliability.md).

`OMP_NUM_THREADS=1 python -m benchmarks.endurance --write`. Visitors have chats of two turns with the head of the chat
pair, edges decode with two services; both are processes of low priority on the same cores. One visitor sends 20,000
characters again and again. In the last third, a service is killed every minute and started again. All texts are
greedy and compared with isolated AR decoding.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
from websockets.exceptions import WebSocketException

from benchmarks.load import HOST, LINK, SERVICE, Tallies, Visit, page_process, seconds_since, visit
from benchmarks.page_client import PageClient
from benchmarks.runs import possibly_failed, traced
from benchmarks.tables import ROOT, publish, run_study, study_parser
from specdemo.core.errors import UserError
from specdemo.core.metrics import percentile
from specdemo.models.model_pool import ModelPool
from specdemo.models.tokenizer import ChatMessage
from specdemo.models.zoo import CHAT_PAIR
from specdemo.prompts import load_prompts
from specdemo.recipe import Recipe
from specdemo.remote.config import CloudConfig

TABLES = {"endurance": "docs/reliability.md"}
PROMPT_STEP = 5  # every fifth chat prompt
FOLLOW_UP = "Summarise your answer in one sentence."
VISITOR_NICENESS, EDGE_NICENESS = 5, 19
LONG_CHARACTERS, LONG_PAUSE_S = 20_000, 120.0
KILL_EVERY_S, SAMPLE_S = 60.0, 10.0
RECENT = 200  # runs of the times in the log
CHAT = Recipe(pair=CHAT_PAIR, method="ar", chat=True, temperature=0.0, top_p=1.0)
COLUMNS = {
    "process": "{name}",
    "minutes": "{minutes:.0f}",
    "texts": "{texts:,}",
    "lost, different, failed": "{lost}, {wrong}, {failed}",
    "first token or step p50 / p95 s": "{p50_s:.2f} / {p95_s:.2f}",
    "while a long prompt is read": "{delayed}",
    "killed": "{killed}",
    "MB, second half: slope per minute": "{megabytes:.0f}: {slope:+.2f}",
    "threads, descriptors, temporary files after 1/2 and at the end": "{resources}",
    "cores of the clients": "{share:.2f}",
}


@dataclass(frozen=True)
class Sample:
    """Resources of a process at a time in minutes."""

    minute: float
    megabytes: float
    threads: int
    descriptors: int
    files: int  # in the folder for temporary files

    @classmethod
    def of(cls, process: psutil.Process, minute: float, folder: Path) -> Sample:
        with process.oneshot():
            counts = process.num_threads(), process.num_fds(), sum(1 for _ in folder.rglob("*"))
            return cls(minute, process.memory_info().rss / 1e6, *counts)


class Service:
    """A service of the chat pair that can be killed; it restarts at its port."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.url = folder, f"http://{HOST}:0"
        self.start()

    def start(self) -> None:
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", "specdemo", "serve", "--pair", CHAT_PAIR, "--port", port, *SERVICE]
        environment = {**os.environ, "TMPDIR": str(self._folder), "SPECDEMO_QUEUE": "256"}
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().removeprefix("listening on ").strip()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Chat:
    """Messages and expected answers of a conversation."""

    messages: list[ChatMessage]
    answers: list[list[int]] = field(default_factory=list)


@dataclass
class TimedVisit:
    """A run of the page and the time at which it began."""

    start: float
    run: Visit
    expected: list[int]


def isolated_chat(questions: Sequence[str], max_tokens: int, pool: ModelPool) -> Chat:
    """Decode the answers one after another, alone."""
    chat = Chat([])
    for question in questions:
        chat.messages.append({"role": "user", "content": question})
        trace = traced(replace(CHAT, max_tokens=max_tokens), list(chat.messages), pool)
        chat.answers.append(trace.tokens)
        chat.messages.append({"role": "assistant", "content": "".join(event.text for event in trace.steps)})
    return chat


def visitor(url: str, number: int, chats: Sequence[Chat], end: float, pause_s: float, visits: list[TimedVisit]) -> None:
    """Have one chat after another until `end`."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), VISITOR_NICENESS)
    client, index = PageClient(url, f"visitor{number}"), number
    settings = {"temperature": 0, "top-p": 1, "compare": False}
    while time.monotonic() < end:
        chat = chats[index % len(chats)]
        for turn, answer in enumerate(chat.answers):
            prompt, start = chat.messages[2 * turn]["content"], time.monotonic()
            values = {**settings, "prompt": prompt, "max-tokens": len(answer)}
            try:
                run = visit(client.frames(values, continue_chat=turn > 0), seconds_since(start))
            except (OSError, HTTPException, WebSocketException):
                run = Visit()  # lost
            visits.append(TimedVisit(start, run, answer))
            if not (run.over and run.done):
                break
        index += 7
        threading.Event().wait(min(pause_s, max(0.0, end - time.monotonic())))


def decode_on_edges(recipe: Recipe, count: int, chats: Sequence[Chat], minutes: float) -> dict[str, float]:
    """Decode first answers on `count` threads of this process; return the columns of the edges."""
    os.nice(EDGE_NICENESS)
    end, tallies, pool = time.monotonic() + 60 * minutes, Tallies(), ModelPool()

    def edge(number: int) -> None:
        while time.monotonic() < end:
            chat = chats[number % len(chats)]
            limited, number = replace(recipe, max_tokens=len(chat.answers[0])), number + 7
            try:
                tallies.add(possibly_failed(limited, chat.messages[0]["content"], pool), chat.answers[0])
            except UserError as error:
                print(f"edge: {error}", file=sys.stderr)
                tallies.add_refusal()

    for thread in [start(edge, number) for number in range(count)]:
        thread.join()
    steps = {f"p{percent}_s": percentile(tallies.latencies, percent / 100) for percent in (50, 95)}
    counts = {"texts": tallies.texts, "wrong": tallies.wrong, "failed": tallies.failed}
    return {**counts, **steps, "share": processor_seconds() / (60 * minutes)}


def processor_seconds() -> float:
    """Return the processor time of this process."""
    times = psutil.Process().cpu_times()
    return times.user + times.system


def growth(samples: Sequence[Sample]) -> float:
    """Return the slope of the memory in the second half, in MB per minute."""
    half = samples[len(samples) // 2 :]
    return statistics.linear_regression([s.minute for s in half], [s.megabytes for s in half]).slope


def resources(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the columns of a process."""
    middle, last = samples[len(samples) // 2], samples[-1]
    pairs = ((middle.threads, last.threads), (middle.descriptors, last.descriptors), (middle.files, last.files))
    return {
        "minutes": last.minute,
        "megabytes": last.megabytes,
        "slope": growth(samples),
        "resources": ", ".join(f"{before} {after}" for before, after in pairs),
    }


def waits(visits: Iterable[TimedVisit]) -> list[float]:
    return [v.run.first_token_s for v in visits if v.run.first_token_s is not None]


def of_page(visits: Sequence[TimedVisit], long: Sequence[TimedVisit]) -> dict[str, Any]:
    """Return the columns of the visitors; `long`: the runs of the visitor with long prompts."""
    runs, seconds = [v.run for v in visits], waits(visits)
    read = [(v.start, v.start + (v.run.first_token_s or 0.0)) for v in long]
    beside = waits(v for v in visits if any(begin <= v.start <= end for begin, end in read))
    delayed = f"{percentile(beside, 0.5):.2f} / {percentile(beside, 0.95):.2f}" if beside else "-"
    return {
        "texts": len(runs) + len(long),
        "lost": sum(run.gaps > 0 or not run.over for run in (*runs, *(v.run for v in long))),
        "wrong": sum(v.run.done and v.run.tokens != v.expected for v in (*visits, *long)),
        "failed": sum(v.run.over and not v.run.done for v in (*visits, *long)),
        "p50_s": percentile(seconds, 0.5),
        "p95_s": percentile(seconds, 0.95),
        "delayed": f"{delayed} ({len(long)} prompts, first token p50 {percentile(waits(long) or [0.0], 0.5):.1f} s)",
    }


def start(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread


def study(options: argparse.Namespace) -> None:
    """Load page and services, kill services, and publish texts, times and resources."""
    pool = ModelPool()
    texts = [prompt.text for prompt in load_prompts(chat=True)[::PROMPT_STEP]]
    chats = [isolated_chat((text, FOLLOW_UP), options.max_tokens, pool) for text in texts]
    long_text = "\n\n".join([*texts, *(prompt.text for prompt in load_prompts())] * 9)[:LONG_CHARACTERS]
    long_chat = isolated_chat((long_text,), options.max_tokens, pool)
    pool.clear()
    visits: list[TimedVisit] = []
    long: list[TimedVisit] = []
    samples: dict[str, list[Sample]] = {"page": [], "services": []}
    killed = 0
    with ExitStack() as opened:
        folders = [Path(opened.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)]
        services = [Service(folder) for folder in folders[1:]]
        opened.callback(lambda: [service.kill() for service in services])
        url, process = opened.enter_context(page_process(CHAT_PAIR, TMPDIR=str(folders[0])))
        begin, used = time.monotonic(), processor_seconds()
        end, kills = begin + 60 * options.minutes, begin + 40 * options.minutes
        cloud = CloudConfig(" ".join(service.url for service in services), **LINK)
        recipe = replace(CHAT, method="lookup", cloud=cloud)
        processes = opened.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
        of_edges = processes.submit(decode_on_edges, recipe, options.edges, chats, options.minutes)
        threads = [start(visitor, url, i, chats, end, 0.0, visits) for i in range(options.visitors)]
        threads.append(start(visitor, url, options.visitors, [long_chat], end, LONG_PAUSE_S, long))
        while not of_edges.done() or any(thread.is_alive() for thread in threads):
            time.sleep(SAMPLE_S)
            now = time.monotonic()
            if kills + killed * KILL_EVERY_S <= now < end:
                services[killed % 2].kill()
                services[killed % 2].start()
                killed += 1
            minute = (now - begin) / 60
            samples["page"].append(Sample.of(process, minute, folders[0]))
            if not killed:
                samples["services"].append(Sample.of(services[0].process, minute, folders[1]))
            recent = waits(visits[-RECENT:])
            p95 = f"first token p95 {percentile(recent, 0.95):.1f} s of {len(recent)} runs" if recent else ""
            print(f"{minute:.1f}: {len(visits)} runs,", p95, samples["page"][-1], file=sys.stderr)
        share = (processor_seconds() - used) / (time.monotonic() - begin)
    page = {"share": share, **of_page(visits, long), **resources(samples["page"])}
    edges = {"killed": killed, **of_edges.result(), **resources(samples["services"])}
    publish(options, "endurance", COLUMNS, rows(options, page, edges))


def rows(options: argparse.Namespace, page: dict[str, Any], edges: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of page and services; only services are killed."""
    return [
        {"name": f"page, {options.visitors} visitors", "killed": "-", **page},
        {"name": f"services, {options.edges} edges", "lost": "-", "delayed": "-", **edges},
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--visitors", type=int, default=50)
    parser.add_argument("--edges", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
