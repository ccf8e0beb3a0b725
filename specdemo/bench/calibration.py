"""Calibrate the thresholds of gates: percentiles of each signal over drafts (practice guide, section 8)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from specdemo.bench.measure import BenchProgress
from specdemo.core.decode import Verifier, decode
from specdemo.core.errors import UserError
from specdemo.core.metrics import percentile
from specdemo.core.step import Draft, Verdict
from specdemo.drafters import METHODS
from specdemo.models.chat_prompt import read_prompt
from specdemo.models.engines.llama_weights import with_dropout
from specdemo.models.kv_cache import CachedModel
from specdemo.models.load import LoadedModel
from specdemo.models.model_pool import ModelPool
from specdemo.models.zoo import PAIRS
from specdemo.pipeline import build_pipeline
from specdemo.prompts import Prompt
from specdemo.recipe import Recipe, RunPlan, plan_run
from specdemo.remote.gates import PASSES, RecordingPolicy, Variance, mc_dropout, signals
from specdemo.worker import yield_device

PERCENTILES = {"nll": 0.8, "entropy": 0.8, "margin": 0.2, "variance": 0.8}
GUIDE = {"nll": "80th percentile", "entropy": "2.5", "margin": "0.2"}
UNITS = {"nll": "nats", "entropy": "bits"}


class SignalRecorder:
    """Verifier that records the signals of all drafts."""

    def __init__(self, verifier: Verifier, policy: RecordingPolicy, variance: Variance | None) -> None:
        self._verifier, self._policy = verifier, policy
        self._variance = variance
        self.signals: dict[str, list[float]] = {name: [] for name in PERCENTILES if variance or name != "variance"}

    def verify(self, tokens: Sequence[int], draft: Draft, hard_mask: Sequence[int] | None = None) -> Verdict:
        if draft.tokens:
            for name, values in signals(self._policy.log_probs, draft).items():
                self.signals[name] += values
            if self._variance is not None:
                self.signals["variance"] += self._variance(tokens, draft)
        return self._verifier.verify(tokens, draft)


@dataclass(frozen=True)
class Calibration:
    """Thresholds by signal; `missing`: why there is no variance."""

    thresholds: dict[str, float]
    tokens: int
    texts: int
    missing: str = ""

    @classmethod
    def of(cls, values: dict[str, list[float]], texts: int, missing: str = "") -> Calibration:
        """Raise `UserError` without values."""
        count = len(values["nll"])
        if not count:
            raise UserError("the texts ended before a draft: provide other prompts, or more tokens")
        thresholds = {name: percentile(values[name], PERCENTILES[name]) for name in values}
        rounded = {name: float(f"{threshold:.4g}") for name, threshold in thresholds.items()}
        return cls(rounded, count, texts, missing)

    @property
    def flags(self) -> str:
        values = (f"--gate-{name} {threshold:g}" for name, threshold in self.thresholds.items())
        return " ".join((f"--gate {' '.join(self.thresholds)}", *values))

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return signal, percentile, threshold and value of the guide."""
        return [
            (
                f"{name}, {UNITS[name]}" if name in UNITS else name,
                f"{100 * share:.0f}",
                f"{self.thresholds[name]:g}" if name in self.thresholds else "–",
                GUIDE.get(name, "–"),
            )
            for name, share in PERCENTILES.items()
        ]


def refuse_without_drafter(pair: str | None, target: str | None, drafter: str | None) -> None:
    """Raise `UserError` for named models without a drafter, which gates need."""
    lacks_drafter = target or (pair in PAIRS and PAIRS[pair].drafter is None)
    if lacks_drafter and not drafter:
        raise UserError("gates need the distributions of a draft model: add a drafter, or choose pair bundled")


def calibrate(recipe: Recipe, prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[BenchProgress | Calibration]:
    """Verify every draft on this machine; yield progress, then the result. Raises `UserError`."""
    if not METHODS[recipe.method].gates or recipe.universal:
        names = ", ".join(name for name, method in METHODS.items() if method.gates)
        raise UserError(f"gates need the distributions of a draft model: choose method {names}, without universal")
    local = plan_run(replace(recipe, cloud=None))
    assert local.drafter is not None
    target = pool.get(local.target)
    drafter = pool.get(local.drafter)
    values: dict[str, list[float]] = {}
    with ExitStack() as caches:
        variance, missing = _variance(drafter, caches)
        for number, prompt in enumerate(prompts, 1):
            yield BenchProgress(number, len(prompts), prompt.name)
            for name, recorded in _drafted_signals(local, target, drafter, prompt, variance).items():
                values.setdefault(name, []).extend(recorded)
    yield Calibration.of(values, len(prompts), missing)


def _variance(drafter: LoadedModel, caches: ExitStack) -> tuple[Variance | None, str]:
    try:
        models = [with_dropout(drafter.model, seed) for seed in range(PASSES)]
    except UserError as error:
        return None, str(error)
    return mc_dropout([caches.enter_context(closing(CachedModel(model))).score for model in models]), ""


def _drafted_signals(
    plan: RunPlan, target: LoadedModel, drafter: LoadedModel, prompt: Prompt, variance: Variance | None
) -> dict[str, list[float]]:
    recipe = plan.recipe
    with closing(build_pipeline(plan, target, drafter)) as pipeline:
        policy = RecordingPolicy(pipeline.policy)
        recorder = SignalRecorder(pipeline.verifier, policy, variance)
        inputs = (prompt.text, recipe.chat, target.vocab_size, recipe.template_options)
        tokens = read_prompt(target.tokenizer, *inputs).tokens
        limit = max(1, min(recipe.max_tokens, pipeline.shared_context - len(tokens)))
        roles = recorder, pipeline.drafter, policy
        for _ in decode(tokens, *roles, max_tokens=limit, stop=pipeline.stop, clock=time.perf_counter):
            yield_device()
    return recorder.signals
