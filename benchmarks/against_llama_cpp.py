"""Speed against llama.cpp and ik_llama.cpp with one GGUF file: table `against_llama_cpp-prompts` of the native engine.

`python -m benchmarks.against_llama_cpp --llama-server PATH [--ik-llama-server PATH] --questions FILE ... --write`. All
engines have the chat model's file, the threads of torch and the same tokens; a server answers each question once.
Speeds of the other engines are those that their servers report, without connections.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, islice, product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch

from benchmarks.document_tables import chat_recipes, of_each_class
from benchmarks.runs import traced
from benchmarks.tables import Study, publish, study_command
from specdemo.bench.table import ratio_with_interval
from specdemo.core.errors import UserError
from specdemo.core.metrics import interval
from specdemo.models.chat_prompt import read_prompt
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import CHAT_PAIR, PAIRS
from specdemo.prompts import read_questions
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.access import bind

TABLES = {"against_llama_cpp-prompts": "docs/native-engine.md"}
TEMPERATURES = (0.0, 1.0)
OURS, LLAMA, IK = "specdemo", "llama.cpp", "ik_llama.cpp"
PLAIN, DEFAULT, READING = "plain", "default", "plain, batches of 512"  # READING: lengths only
_REPACKED = "--run-time-repack"  # faster with this model
_SMALL = f"{_REPACKED} -b 31 -ub 31 "  # larger batches have wrong logits of this model
SETTINGS = {  # flags of the servers; the last setting at temperature 0 only
    LLAMA: {
        PLAIN: "",
        "--spec-default": "--spec-default",
        "ngram-simple": "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8",
    },
    IK: {
        PLAIN: _SMALL,
        "suffix": _SMALL + "--spec-type suffix",
        READING: _REPACKED,
    },
}
COLUMNS = {
    "measured": "{kind}",
    "prompts": "{prompts}",
    "temperature": "{temperature:g}",
    "engine": "{engine}",
    "setting": "{setting}",
    "tokens/s": "{theirs:.0f}",
    "specdemo tokens/s": "{ours:.0f}",
    "ratio": "{ratio}",
}
START_S, ANSWER_S = 60, 300
WARM_UP = list(range(1000, 1064))


class Speeds(NamedTuple):
    """Tokens/s of reading a prompt, and of decoding after the first token, if there are more."""

    reading: float
    decoding: float | None


@dataclass(frozen=True)
class Lane:
    """Engine with a setting at a temperature; `run` decodes after the tokens of a prompt."""

    engine: str
    setting: str
    temperature: float
    run: Callable[[list[int]], Speeds]


Prompt = tuple[str, list[int]]  # class, tokens
SpeedsOf = Mapping[Lane, Speeds]  # with a prompt
Answers = Mapping[str, Sequence[SpeedsOf]]  # by class of prompts


def our_speeds(recipe: Recipe, pool: ModelPool, prompt: list[int]) -> Speeds:
    metrics = traced(replace(recipe, chat=False), prompt, pool).metrics
    return Speeds(len(prompt) / metrics["ttft_s"], metrics["tokens_per_second"])


def their_speeds(url: str, temperature: float, tokens: int, prompt: list[int]) -> Speeds:
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": temperature,
        "top_k": 0 if temperature else 1,
        "samplers": ["top_k", "temperature"],
        "cache_prompt": False,
    }
    request = Request(f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=ANSWER_S) as answer:
        timings = json.load(answer)["timings"]
    if timings["prompt_n"] != len(prompt):
        raise UserError(f"{url} has read {timings['prompt_n']} of {len(prompt)} tokens: disable its cache of prompts")
    decoded = timings["predicted_n"] - 1
    reading = 1000 * len(prompt) / timings["prompt_ms"]
    return Speeds(reading, 1000 * decoded / timings["predicted_ms"] if decoded else None)


@contextmanager
def server(program: Path, flags: str) -> Iterator[str]:
    with closing(bind("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    sizes = ["-c", "8192", "-np", "1", "-t", str(torch.get_num_threads())]
    command = [str(program.resolve()), "-m", PAIRS[CHAT_PAIR].target, "--port", port, *sizes, *flags.split()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}  # its defaults
    url = f"http://127.0.0.1:{port}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet, env=environment, cwd=program.parent) as process:  # where logs are written
        try:
            wait_for(url, process)
            yield url
        finally:
            process.kill()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            with urlopen(f"{url}/health", timeout=START_S):
                return
        except URLError:
            time.sleep(0.1)
    raise UserError(f"{process.args!r} did not start: run it to see why")


def version(program: Path) -> str:
    """Return the build number or commit that a server prints."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version: .*?\b((?=\w*\d)\w{4,})", done.stdout + done.stderr)
    return found[1] if found else "of unknown version"


def our_lanes(pool: ModelPool, tokens: int) -> list[Lane]:
    """Return AR decoding and the settings of the chat pair."""
    recipes = [recipe for recipe in chat_recipes(tokens) if recipe.temperature in TEMPERATURES]
    settings = {recipe: PLAIN if recipe.method == "ar" else DEFAULT for recipe in recipes}
    return [Lane(OURS, settings[recipe], recipe.temperature, partial(our_speeds, recipe, pool)) for recipe in recipes]


def their_lanes(engine: str, program: Path, tokens: int, servers: ExitStack) -> Iterator[Lane]:
    """Start a server for each setting and temperature."""
    title = f"{engine} {version(program)}"
    *common, last = SETTINGS[engine]
    for temperature in TEMPERATURES:
        for setting in common if temperature else (*common, last):
            url = servers.enter_context(server(program, SETTINGS[engine][setting]))
            yield Lane(title, setting, temperature, partial(their_speeds, url, temperature, tokens))


def measure(lanes: Sequence[Lane], prompts: Sequence[Prompt]) -> Answers:
    """Run all lanes in shuffled order on each prompt, after a warm-up; return the speeds by class of prompts."""
    for lane in lanes:
        lane.run(WARM_UP)
    rng, answers = random.Random(0), defaultdict(list)
    for number, (kind, prompt) in enumerate(prompts, 1):
        print(f"{number} of {len(prompts)}: {kind}", file=sys.stderr, flush=True)
        answers[kind].append({lane: lane.run(prompt) for lane in rng.sample(lanes, len(lanes))})
    return answers


def compare(kind: str, lane: Lane, own: Lane, speeds: Sequence[SpeedsOf], figure: str = "decoding") -> dict[str, Any]:
    """Return the medians of two lanes, and the median of their ratios on each prompt."""
    found = [(getattr(of[own], figure), getattr(of[lane], figure)) for of in speeds]
    pairs = [(ours, theirs) for ours, theirs in found if ours and theirs]
    ratios = [ours / theirs for ours, theirs in pairs]
    return {
        "kind": kind,
        "prompts": len(pairs),
        "engine": lane.engine,
        "setting": lane.setting,
        "temperature": lane.temperature,
        "theirs": statistics.median(theirs for _, theirs in pairs),
        "ours": statistics.median(ours for ours, _ in pairs),
        "ratio": ratio_with_interval(statistics.median(ratios), interval(ratios)),
    }


def rows_of_questions(lanes: Sequence[Lane], answers: Answers) -> Iterator[dict[str, Any]]:
    """Yield all lanes over all questions, then the fastest one of each other engine by class."""
    for own in lanes:
        if (own.engine, own.setting) == (OURS, DEFAULT):
            others = [lane for lane in lanes if lane.temperature == own.temperature and lane is not own]
            yield from (compare("all", lane, own, list(chain(*answers.values()))) for lane in others)
            for kind, speeds in answers.items():
                for engine in dict.fromkeys(lane.engine for lane in others if lane.engine != OURS):
                    rows = [compare(kind, lane, own, speeds) for lane in others if lane.engine == engine]
                    yield max(rows, key=itemgetter("theirs"))


def rows_of_lengths(lanes: Sequence[Lane], answers: Answers) -> Iterator[dict[str, Any]]:
    """Yield the speeds of reading prompts and of decoding after them; the first lane is ours."""
    own, *others = lanes
    for (kind, speeds), lane in product(answers.items(), others):
        yield compare(f"reading {kind}", lane, own, speeds, "reading")
        yield compare(f"after {kind}", lane, own, speeds)


def study(options: argparse.Namespace) -> None:
    programs = {LLAMA: options.llama_server, IK: options.ik_llama_server}
    programs = {engine: path for engine, path in programs.items() if path}
    for path in programs.values():
        if not path.is_file():
            raise UserError(f"{path} is not a file: build the server and give its path")
        options.command = options.command.replace(str(path), "PATH")
    for path in options.questions:
        options.command = options.command.replace(str(path), path.name)
    pool = ModelPool()
    target = pool.get(plan_run(Recipe(pair=CHAT_PAIR, method="ar")).target)
    questions = [question for path in options.questions for question in read_questions(path)]
    chosen = of_each_class(questions, slice(options.prompts))
    prompts = [(q.kind, read_prompt(target.tokenizer, q.text, True, target.vocab_size).tokens) for q in chosen]
    text = [*islice(cycle(chain(*(prompt for _, prompt in prompts))), max(options.length))]
    texts = [(f"{length:,} tokens", text[:length]) for _ in range(options.rounds) for length in options.length]
    with ExitStack() as servers:
        lanes = our_lanes(pool, options.tokens)
        for engine, program in programs.items():
            lanes += their_lanes(engine, program, options.tokens, servers)
        plain = [lane for lane in lanes if lane.setting in (PLAIN, READING) and not lane.temperature]
        lanes = [lane for lane in lanes if lane.setting != READING]
        rows = [*rows_of_questions(lanes, measure(lanes, prompts)), *rows_of_lengths(plain, measure(plain, texts))]
    publish(options, "against_llama_cpp-prompts", COLUMNS, rows)


OPTIONS = {
    "llama_server": {"type": Path, "required": True, "metavar": "PATH"},
    "ik_llama_server": {"type": Path, "metavar": "PATH"},
    "questions": {"nargs": "+", "type": Path, "required": True, "metavar": "FILE"},
    "prompts": 5,
    "length": [512, 2048, 4500],
    "rounds": 5,
    "tokens": 128,
}
main = study_command(__file__, __doc__, TABLES, Study(study, OPTIONS))

if __name__ == "__main__":
    sys.exit(main())
