"""Drafters for a target: comparison of the models of this machine by their files, and prediction of their speed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdemo.core.errors import UserError
from specdemo.core.formats import NOTHING, format_bytes, number, percent
from specdemo.models.engines.generic import has_encoder
from specdemo.models.heads import check_head, is_head, plan_head, tap_count
from specdemo.models.hub import Hub, find_models, local_shapes, model_directories
from specdemo.models.load import read_tokenizer
from specdemo.models.memory_plan import PLANNED_CONTEXT, MemoryPlan, free_on, plan_spec
from specdemo.models.model_pool import ModelPool
from specdemo.models.spec import HeadSpec, ModelSpec, is_gguf
from specdemo.models.tokenizer import Bridge
from specdemo.models.untrusted import model_errors
from specdemo.models.zoo import ASSETS, PAIRS, check_kinds, check_pair, is_downloaded, named_models
from specdemo.option_rules import refuse_with_encoder
from specdemo.preflight import (
    KNOWN_SHARE,
    SHORT_TEXT_TOKENS,
    WORTHWHILE_SPEEDUP,
    Estimate,
    Preflight,
    PreflightProgress,
    predict,
)
from specdemo.prompts import Prompt, alternate_classes, load_prompts
from specdemo.recipe import Recipe, plan_run

TEXTS = 3  # prompts of a class for a prediction, and others to measure its error
DRAFTLESS = ("nasd", "suffix", "lookahead")  # methods that draft without files
HEAD_SETTINGS: dict[str, Any] = {"method": "hybrid", "policy": "path", "gamma": 6}  # for heads of all kinds
COLUMNS = ("candidate", "can draft", "memory", "accepted", "c", "v", "expected speed-up", "gamma")


@dataclass(frozen=True)
class FitTarget:
    """Target of all candidates."""

    recipe: Recipe  # AR decoding with the sampling options of all candidates
    plan: MemoryPlan
    tokenizer: Any

    @classmethod
    def read(cls, name: str, values: Mapping[str, Any], hub: Hub) -> FitTarget:
        """Read a pair's target, hub id, directory or file; `values` of a recipe. Raises `UserError`."""
        pair = PAIRS.get(name)
        model = named_models(name)[0] if pair else name
        common = {"temperature": 0.0, "chat": pair is not None and pair.chat}
        own = {"target": model, "method": "ar", "max_tokens": SHORT_TEXT_TOKENS}
        recipe = replace(Recipe(), **{**common, **values, **own})
        spec = plan_run(recipe).target.resolved()
        return cls(recipe, _read_plan(spec, hub), read_tokenizer(spec, hub))


def _read_plan(spec: ModelSpec, hub: Hub) -> MemoryPlan:
    """Plan the memory of a model with weights. Raises `UserError`."""
    if not is_gguf(spec.name):
        local_shapes(spec.name, hub.weights(spec.name, spec.revision))
    return plan_spec(spec, PLANNED_CONTEXT, hub)


@dataclass(frozen=True)
class FitRow:
    """A candidate: its verdict, the memory of the pair, and the prediction if it was measured."""

    candidate: str
    recipe: Recipe | None  # None if it cannot draft
    reason: str = ""  # obstacle, warning, or error of the prediction
    memory: int | None = None  # bytes of target and drafter
    prediction: Preflight | None = None

    @property
    def can_draft(self) -> str:
        if self.recipe is None:
            return "no"
        return "with --universal, exact" if self.recipe.universal else "yes"

    @property
    def expected(self) -> Estimate | None:
        """Estimate of the best draft length, lowered if the held-out prompts were slower than predicted."""
        if self.prediction is None:
            return None
        best, held_out = self.prediction.best, self.prediction.held_out
        share = 1.0 if held_out is None else min(1.0, held_out.measured.speedup / held_out.predicted)
        return replace(best, speedup=share * best.speedup, low=share * best.low, high=share * best.high)

    @property
    def command(self) -> str:
        """Return the command of a run, empty if the candidate cannot draft."""
        if self.recipe is None:
            return ""
        words = ["specdemo", "run", "PROMPT"]
        for name, option in Recipe.OPTIONS.items():
            value = getattr(self.recipe, name)
            if value != option.default and name != "max_tokens":
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                words += [option.flag] if value is True else [option.flag, shown]
        return shlex.join(words)

    @property
    def cells(self) -> tuple[str, ...]:
        prediction, best = self.prediction, self.expected
        shown = (short_name(self.candidate), self.can_draft, format_bytes(self.memory))
        if prediction is None or best is None:
            return (*shown, *[NOTHING] * (len(COLUMNS) - len(shown)))
        rows = best.gamma + 1 if best.gamma + 1 in prediction.v else max(prediction.v)
        return (
            *shown,
            percent(prediction.alpha),
            number(prediction.c),
            f"v({rows}) {number(prediction.v[rows])}",
            f"{number(best.speedup)} [{number(best.low)}, {number(best.high)}]",
            str(best.gamma),
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "can_draft": self.can_draft, "command": self.command}


def candidates(target: FitTarget, files: Sequence[str], hub: Hub) -> list[str]:
    """Return the given models, otherwise those of this machine and of pairs, and fitting heads of the package."""
    name = target.plan.spec.name
    if files:
        names = [model for file in files for model in find_models(file) or [file]]
    else:
        drafters = {pair.drafter for pair in PAIRS.values() if pair.target == name and pair.drafter}
        heads = map(str, sorted((ASSETS / "heads").iterdir()))
        names = [*filter(is_downloaded, drafters), *(head for head in heads if compare(target, head, hub).recipe)]
        names += [model for _, folder in model_directories() for model in find_models(folder)]
    files_by_path = {Path(model).expanduser().resolve(): model for model in names}
    files_by_path.pop(Path(name).expanduser().resolve(), None)
    return list(files_by_path.values())


def fit(
    name: str,
    files: Sequence[str],
    values: Mapping[str, Any],  # of all recipes
    pool: ModelPool,
    kinds: Sequence[str] = (),
    quick: bool = False,  # compare files, load nothing
) -> Iterator[PreflightProgress | FitRow]:
    """Yield progress and a row per candidate and method without drafter. Raises `UserError` for the target."""
    hub = replace(pool.hub, offline=True)
    target = FitTarget.read(name, values, hub)
    names = candidates(target, files, hub)
    prompts = alternate_classes(load_prompts(kinds, target.recipe.chat))[: 2 * TEXTS]
    available = free_on(target.plan.device) + pool.weight_bytes  # the pool unloads models
    measured = []
    for candidate in [*names, *DRAFTLESS]:
        yield PreflightProgress(0.0, f"{short_name(candidate)}: comparing the files")
        row = _within(available, compare(target, candidate, hub))
        if quick or row.recipe is None:
            yield row
        else:
            measured.append(row)
    yield from _measure(measured, prompts, pool)


def _within(available: int, row: FitRow) -> FitRow:
    """Refuse a candidate above the available bytes."""
    if row.recipe is None or row.memory is None or row.memory <= available:
        return row
    needed, free = format_bytes(row.memory), format_bytes(available)
    reason = f"it needs {needed} with the target and {free} are free: choose a smaller one, or close other programs"
    return replace(row, recipe=None, reason=reason)


def _measure(
    rows: Sequence[FitRow], prompts: Sequence[Prompt], pool: ModelPool
) -> Iterator[PreflightProgress | FitRow]:
    """Measure the candidates in turn, then held-out prompts in the opposite order: a machine may become slower."""
    predictions = [_with_prediction(row, prompts, pool) for row in rows]
    count = 2 * len(predictions)
    for first, until in ((0, KNOWN_SHARE), (len(predictions), 1.0)):
        for i, prediction in enumerate(predictions, first):
            for item in prediction:
                if isinstance(item, FitRow):
                    yield item
                    continue
                yield PreflightProgress((i + item.share) / count, item.stage)
                if item.share >= until:
                    break
        predictions.reverse()


def _with_prediction(row: FitRow, prompts: Sequence[Prompt], pool: ModelPool) -> Iterator[PreflightProgress | FitRow]:
    """Yield the progress of the prediction of a candidate, then the row with the prediction or its error."""
    assert row.recipe is not None
    try:
        for item in predict(row.recipe, prompts, pool):
            if isinstance(item, Preflight):
                best = replace(row.recipe, gamma=item.best.gamma)
                notes = "; ".join(map(str, filter(None, (row.reason, item.held_out))))
                yield replace(row, prediction=item, recipe=best, reason=notes)
            else:
                yield PreflightProgress(item.share, f"{short_name(row.candidate)}: {item.stage}")
    except UserError as error:
        yield replace(row, reason=f"not measured: {error}")


def compare(target: FitTarget, name: str, hub: Hub) -> FitRow:
    """Compare a method, or the files of a candidate, with the target, without loading weights."""
    try:
        with model_errors(name):
            if name in DRAFTLESS:
                row = FitRow(name, replace(target.recipe, method=name), memory=target.plan.total)
            else:
                row = (_head_row if is_head(name, hub) else _model_row)(target, name, hub)
            if has_encoder(target.plan.config):
                refuse_with_encoder(row.recipe)
            return row
    except UserError as error:
        return FitRow(name, None, str(error).replace(name, short_name(name)))


def _model_row(target: FitTarget, name: str, hub: Hub) -> FitRow:
    recipe = replace(target.recipe, method="draft", drafter=name)
    spec = plan_run(recipe).drafter
    assert spec is not None
    plan = _read_plan(spec.resolved(), hub)
    check_kinds(has_encoder(target.plan.config), has_encoder(plan.config))
    tokenizer, memory = read_tokenizer(plan.spec, hub), target.plan.total + plan.total
    try:
        check_pair(target.tokenizer, tokenizer)
    except UserError as error:
        Bridge(target.tokenizer, tokenizer, ())  # raises an error if re-encoding is impossible
        return FitRow(name, replace(recipe, universal=True), str(error), memory)
    return FitRow(name, recipe, memory=memory)


def _head_row(target: FitTarget, name: str, hub: Hub) -> FitRow:
    recipe, spec = replace(target.recipe, head=name, **HEAD_SETTINGS), target.plan.spec
    warning = check_head(HeadSpec(name, spec), target.plan.config, hub)
    plan = plan_spec(spec, PLANNED_CONTEXT, hub, taps=tap_count(name, hub))
    return FitRow(name, recipe, warning, plan.total + plan_head(name, plan, hub).total(PLANNED_CONTEXT))


def ranked(rows: Iterable[FitRow]) -> list[FitRow]:
    """Sort by the lower end of the expected speed-up; candidates unable to draft are last."""

    def order(row: FitRow) -> tuple[float, bool, str]:
        return -row.expected.low if row.expected else 0.0, row.recipe is None, row.can_draft

    return sorted(rows, key=order)


def advice(rows: Sequence[FitRow]) -> str:
    """Return the recommendation, in a sentence."""
    expected = [(row, row.expected) for row in ranked(rows) if row.expected]
    if not expected:
        able = sum(row.recipe is not None for row in rows)
        return f"{able} of {len(rows)} candidates can draft; their speed is not measured"
    worthwhile = [(row, estimate) for row, estimate in expected if estimate.speedup >= WORTHWHILE_SPEEDUP]
    if not worthwhile:
        row, fastest = max(expected, key=lambda pair: pair[1].speedup)
        name = f"{short_name(row.candidate)}, the fastest candidate,"
        return f"do not speculate: {name} has {fastest.speedup:.2f}x the speed of AR decoding"
    (row, best), *others = worthwhile
    assert row.prediction is not None
    doubt = f"at least {best.low:.2f}x" if best.low > 1 else "possibly no difference"
    equal = [short_name(other.candidate) for other, estimate in others if estimate.high >= best.speedup]
    parts = [
        f"choose {short_name(row.candidate)} with {row.prediction.label(best)}",
        f"about {best.speedup:.2f}x the speed of AR decoding, {doubt}",
    ]
    return ": ".join(parts) + (f"; possibly as fast: {', '.join(equal)}" if equal else "")


def short_name(name: str) -> str:
    """Return the last two parts of an absolute path, and other names as they are."""
    path = Path(name)
    return "/".join(path.parts[-2:]) if path.is_absolute() else name
