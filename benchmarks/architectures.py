"""Passes that the language models of `transformers` support: table `architectures` in docs/models.md.

Every causal class and every encoder-decoder runs as a small random model of its default configuration in a process of
its own. `specdemo.models.cache_check` determines the limits. Then random drafts are scored through the engine in use,
with rollbacks, and each row is compared with a pass without a KV cache. The exit code is 1 after a wrong row.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import random
import re
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkProcess
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from benchmarks.tables import publish, run_study, study_parser
from specdemo.cli.arguments import at_least_one
from specdemo.core.errors import UserError
from specdemo.core.step import Draft
from specdemo.models.cache_check import cache_support
from specdemo.models.engines.generic import full_pass, has_encoder, refuse_recurrent
from specdemo.models.engines.llama_weights import pack
from specdemo.models.kv_cache import CachedModel
from specdemo.models.small_twin import reduced, small_twin

TABLES = {"architectures": "docs/models.md"}
SOURCE = [5, 7, 9, 11]
STEPS = 6
TOLERANCE = 2e-3  # of the spread of the logits
RESULTS = ("all methods", "chains only", "chains without KV cache", "refused", "not tested", "WRONG")
Task = tuple[str, type[PreTrainedModel] | None, PretrainedConfig | None]  # name, class, configuration
ATTENTION = {"head_dim": 64}
SETTINGS: dict[str, dict[str, Any]] = {  # without a usable default
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": ATTENTION,
    "hunyuan_v1_moe": ATTENTION,
    "lfm2_moe": {"layer_types": ["full_attention"] * 32},
    "ministral": ATTENTION,
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
}


def classes(kinds: Sequence[str]) -> Iterator[Task]:
    """Yield the classes of the model types `kinds` (default: all) with default configurations, `None` if invalid."""
    for auto, names in (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ):
        for kind in names:
            if kinds and kind not in kinds:
                continue
            try:
                config = CONFIG_MAPPING[kind](**SETTINGS.get(kind, {}))
            except Exception:  # its defaults contradict each other
                yield names[kind], None, None
                continue
            if has_encoder(config) or auto is AutoModelForCausalLM:
                found = auto._model_mapping[type(config)]
                yield found.__name__, found, config


def examine(kind: type[PreTrainedModel] | None, config: PretrainedConfig | None) -> tuple[str, str]:
    """Return result and reason for a class."""
    if kind is None or config is None:
        return "not tested", "invalid default configuration"
    try:
        refuse_recurrent(kind, config)
    except UserError as error:
        return "refused", _cause(kind, error)
    try:
        model = small_twin(kind, reduced(kind, config))
        full_pass(model, SOURCE)(torch.tensor([[3, 4]]))
    except Exception as error:
        return "not tested", f"{type(error).__name__}: {error}".splitlines()[0]
    try:
        support = cache_support(model)
    except UserError as error:
        return "refused", _cause(kind, error)
    if support.packs:
        pack(model)
    if not exact(model, forests=not support.forests):
        return "WRONG", ""
    if support.uncached:
        return "chains without KV cache", support.uncached
    return ("chains only", support.forests) if support.forests else ("all methods", "")


def _cause(kind: type[PreTrainedModel], error: UserError) -> str:
    return re.sub(r" \(.*\)|, so .*|:.*", "", str(error).removeprefix(kind.__name__)).strip()


@torch.inference_mode()
def exact(model: PreTrainedModel, forests: bool) -> bool:
    """Compare rows of random drafts with passes over their paths, while random nodes are accepted."""
    encoder, rng = has_encoder(model.config), random.Random(0)
    cached, full = CachedModel(model, source=SOURCE if encoder else ()), full_pass(model, SOURCE)
    tokens = [rng.randrange(3, 90) for _ in range(7)]
    for _ in range(STEPS):
        size = rng.randrange(1, 6)
        parents = tuple(rng.randrange(-1, i) if forests else i - 1 for i in range(size))
        draft = Draft(tuple(rng.randrange(3, 90) for _ in range(size)), parents)
        rows = cached.score(tokens, draft)
        paths = [[*tokens, *(draft.tokens[i] for i in draft.path(node))] for node in range(-1, size)]
        expected = torch.stack([full(torch.tensor([path]))[-1] for path in paths])
        if not (rows - expected).abs().max() <= TOLERANCE * expected.std():
            return False
        tokens = [*paths[rng.randrange(size + 1)], rng.randrange(3, 90)]
    return True


def results(kinds: Sequence[str], processes: int, limit: float) -> dict[str, tuple[str, str]]:
    """Return result and reason by class name; encoders that are refused run again as decoders, with an asterisk."""
    found: dict[str, tuple[str, str]] = {}
    waiting = list({task[0]: task for task in classes(kinds)}.values())
    running: list[tuple[Task, ForkProcess, Any]] = []
    while waiting or running:
        while waiting and len(running) < processes:
            running.append(_start(waiting.pop(0)))
        (name, kind, config), process, answers = running.pop(0)
        try:
            found[name] = answers.get(timeout=limit)
        except queue.Empty:
            found[name] = "not tested", f"no result within {limit:g} s"
            process.kill()
        process.join()
        print(name, *found[name], sep=" | ", file=sys.stderr, flush=True)
        if found[name][0] == "refused" and getattr(config, "is_decoder", True) is False:
            settings = {**SETTINGS.get(config.model_type, {}), "is_decoder": True}
            waiting.append((f"{name}*", kind, type(config)(**settings)))
    return found


def _start(task: Task) -> tuple[Task, ForkProcess, Any]:
    context, (_, kind, config) = multiprocessing.get_context("fork"), task
    answers = context.Queue()
    process = context.Process(target=lambda: answers.put(examine(kind, config)))
    process.start()
    return task, process, answers


def grouped(found: dict[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """Return a record per result and reason with the number of classes and their short names."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, (result, reason) in sorted(found.items()):
        key = (result, "no small model of the default configuration runs" if result == "not tested" else reason)
        groups.setdefault(key, []).append(re.sub(r"ForCausalLM|ForConditionalGeneration|LMHeadModel", "", name))
    order = sorted(groups, key=lambda key: (RESULTS.index(key[0]), -len(groups[key])))
    return [
        {
            "result": key[0],
            "reason": key[1],
            "count": len(groups[key]),
            "names": ", ".join(name.replace("*", "\\*") for name in dict.fromkeys(groups[key])),
        }
        for key in order
    ]


def study(options: argparse.Namespace) -> int:
    """Examine all classes and publish the table. Return 1 after a wrong row."""
    at_least_one("processes", options.processes)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    found = results(options.kinds, options.processes, options.limit)
    columns = {"supported": "{result}", "reason": "{reason}", "classes": "{count}", "names": "{names}"}
    publish(options, "architectures", columns, grouped(found))
    return int("WRONG" in {result for result, _ in found.values()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the study."""
    parser = study_parser(__file__, __doc__, TABLES)
    parser.add_argument("kinds", nargs="*", metavar="TYPE", help="model types, such as gpt2 (default: all)")
    parser.add_argument("--processes", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--limit", type=int, default=60, help="seconds per class (default: 60)")
    return run_study(study, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
