"""Theory tab: plots of the closed forms at the coefficients of sliders and runs, and model calls over time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import gradio as gr

from specdemo.bench.published_tables import published_figures
from specdemo.core import theory
from specdemo.core.errors import UserError
from specdemo.core.events import StepEvent
from specdemo.core.step import HEAD, MODEL
from specdemo.ui.frames import Run
from specdemo.ui.lane import BASELINE, SPEC, Lane
from specdemo.ui.run_figures import NOT_MEASURABLE, cost_terms, measured_speedups, withheld
from specdemo.ui.tabs.components import (
    Block,
    RunViews,
    Series,
    chart,
    chart_view,
    escape_markdown,
    figures_table,
    is_number,
    link_papers,
    timeline,
)
from specdemo.ui.tabs.worked_example import worked_example

UNKNOWN = math.nan


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of the closed forms, by default of the sliders. Costs are in AR steps."""

    alpha: float = 0.8  # acceptance rate of tested tokens
    c: float = 0.05
    gamma: float = 5
    v: float = 1.0  # cost of a pass over gamma + 1 rows
    o: float = 0.0
    c_hat: float = 0.05

    def at_gamma(self, gamma: float) -> Coefficients:
        """Return the coefficients at another draft length. Above 1, v is linear in the number of rows."""
        v = 1 + (self.v - 1) * gamma / self.gamma if self.v > 1 else self.v
        return replace(self, gamma=gamma, v=v if gamma else 1.0)

    @property
    def speedup(self) -> float:
        """Speed-up with v and o."""
        tokens = theory.expected_tokens(self.alpha, self.gamma)
        return theory.speedup(tokens, self.gamma, self.c, self.v, self.o) if self.gamma else 1.0

    def best_gamma(self, longest: int) -> int:
        return theory.best_gamma(self.alpha, self.c, longest, lambda rows: self.at_gamma(rows - 1).v, self.o)


@dataclass(frozen=True)
class TheoryPoint:
    """Measured coefficients and figures of a run; unknown costs and speed-up without a baseline and if `disturbed`."""

    lane: Lane
    coefficients: Coefficients
    share: float  # accepted / drafted
    tokens: float  # tokens per target pass
    speedup: float
    operations: float  # operations per token, relative to AR decoding
    disturbed: bool  # times contradict the number of passes

    @property
    def chains(self) -> bool:
        """True if all drafts were chains, as the closed forms assume."""
        return all(event.step.draft.is_chain for event in self.lane.steps)


def point_of(run: Run | None) -> TheoryPoint:
    """Return the point of a finished run. Raises `UserError` without draft tokens."""
    if run is None:
        raise UserError("No run available: press Run, and its point appears on every curve")
    if not run.over:
        raise UserError("A run is in progress: return when it has ended")
    lane = run.lanes.get(SPEC)
    if lane is None:
        raise UserError("The last run was AR decoding: choose another method to get a point on these curves")
    m = lane.metrics
    if lane.acceptance is None or m.acceptance_rate is None or not m.tokens_per_step:
        raise UserError("The last run tested no draft tokens: choose a method or prompt that drafts")
    gamma, c_hat = m.drafted / m.decode_steps, _draft_operations(lane)
    measured = Coefficients(lane.acceptance, UNKNOWN, gamma, UNKNOWN, UNKNOWN, c_hat)
    baseline = run.lanes.get(BASELINE)
    disturbed = withheld(run.lanes, {})
    if baseline and baseline.ended and not disturbed and (terms := cost_terms(m, baseline.metrics)):
        measured = replace(measured, c=terms.c, v=terms.v, o=terms.o)
    speedup = next(iter(measured_speedups(run.lanes, {})), UNKNOWN)
    operations = (1 + gamma * (1 + c_hat)) / m.tokens_per_step
    return TheoryPoint(lane, measured, m.acceptance_rate, m.tokens_per_step, speedup, operations, disturbed)


def _draft_operations(lane: Lane) -> float:
    """Ratio of the weights read per token, if both models have the same format; point masses are free."""
    drafts = [event.step.draft for event in lane.steps]
    sampled = sum(len(draft.token_probs or ()) for draft in drafts)
    if not sampled:
        return 0.0
    small, large = lane.environment.get("drafter_bytes"), lane.environment.get("target_bytes")
    if not small or not large or lane.recipe.get("quantization") != lane.recipe.get("drafter_quantization"):
        return UNKNOWN
    return small / large * sampled / sum(map(len, drafts))


ClosedForm = Callable[[Coefficients], float]

_AXES: Mapping[str, tuple[str, Sequence[float]]] = {
    "alpha": ("α", [i / 50 for i in range(51)]),
    "gamma": ("γ", range(17)),
}
_SHADES = [f"var(--curve-{i})" for i in (1, 2, 3, 5, 4)]
_LONGEST = 20  # greatest best draft length of a plot
_MOST_TOKENS = 11  # tokens per pass of an unbounded draft in a plot
_THEOREM = {"v": 1.0, "o": 0.0}


def _tokens(at: Coefficients) -> float:
    tokens = theory.expected_tokens(at.alpha, at.gamma)
    return tokens if at.gamma < math.inf or tokens <= _MOST_TOKENS else UNKNOWN


@dataclass(frozen=True)
class TheoryPlot:
    """Closed form over α or γ at changed coefficients and at those of the sliders; sliders and run are dots."""

    title: str
    x: str  # key of `_AXES`
    y: str
    closed_form: ClosedForm
    measured: Callable[[TheoryPoint], float]
    curves: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # changed coefficients by label
    level: tuple[str, ClosedForm] | None = None  # to compare with, and its label
    dot: ClosedForm | None = None  # of the sliders; by default on their curve

    def chart(self, elem_id: str, at: Coefficients, run: TheoryPoint | None) -> str:
        axis, xs = _AXES[self.x]
        series = [
            Series("line", shade, self._points(self.closed_form, xs, at, **changes), label)
            for (label, changes), shade in zip(self.curves.items(), _SHADES, strict=False)
        ]
        if self.level:
            label, level = self.level
            series.append(Series("line", "var(--curve-baseline)", self._points(level, xs, at), label))
        series.append(Series("line", "var(--curve-set)", self._points(self.closed_form, xs, at)))
        chosen = self._points(self.dot or self.closed_form, [getattr(at, self.x)], at)
        series.append(Series("dot", "var(--dot-set)", chosen, "sliders"))
        if run and not math.isnan(self.measured(run)):
            point = getattr(run.coefficients, self.x), self.measured(run)
            series.append(Series("dot", "var(--dot-run)", [point], "this run"))
        return chart(self.title, axis, self.y, series, elem_id=elem_id)

    def _points(
        self, closed_form: ClosedForm, xs: Sequence[float], at: Coefficients, **changes: float
    ) -> list[tuple[float, float]]:
        points = []
        for x in xs:
            changed = {"gamma": at.gamma, **changes, self.x: x}
            gamma = changed.pop("gamma")
            points.append((x, closed_form(replace(at, **changed).at_gamma(gamma))))
        return [(x, y) for x, y in points if not math.isnan(y)]


def _family(symbol: str, name: str, *values: float, **changes: float) -> dict[str, dict[str, float]]:
    return {f"{symbol} {value:g}".replace("inf", "∞"): {name: value, **changes} for value in values}


_BASELINE = ("", lambda at: 1.0)
# Figures of 2211.17192: 2 (tokens), 3 (best gamma), 4 (speed-up and operations). Keys are element ids.
THEORY_PLOTS: Mapping[str, TheoryPlot] = {
    "plot-tokens": TheoryPlot(
        "Tokens per target pass", "alpha", "tokens", _tokens, lambda run: run.tokens,
        curves=_family("γ", "gamma", 1, 3, 5, 7, math.inf),
    ),
    "plot-speed": TheoryPlot(
        "Speed-up", "alpha", "speed-up", lambda at: at.speedup, lambda run: run.speedup,
        curves=_family("γ", "gamma", 1, 3, 10, **_THEOREM), level=_BASELINE,
    ),
    "plot-gamma": TheoryPlot(
        "Speed-up by draft length", "gamma", "speed-up", lambda at: at.speedup, lambda run: run.speedup,
        curves={"Theorem 3.8": _THEOREM}, level=_BASELINE,
    ),
    "plot-best": TheoryPlot(
        "Best draft length", "alpha", "γ", lambda at: at.best_gamma(_LONGEST),
        lambda run: min(run.coefficients.gamma, _LONGEST),
        curves=_family("c", "c", 0.01, 0.05, 0.2, **_THEOREM), dot=lambda at: at.gamma,
    ),
    "plot-ops": TheoryPlot(
        "Operations per token", "alpha", "× baseline", lambda at: theory.operations(at.alpha, at.gamma, at.c_hat),
        lambda run: run.operations, curves=_family("γ", "gamma", 1, 3, 10),
    ),
    "plot-share": TheoryPlot(
        "α and accepted / drafted", "gamma", "share",
        lambda at: theory.accepted_share(at.alpha, at.gamma) if at.gamma else UNKNOWN,
        lambda run: run.share, level=("α", lambda at: at.alpha),
    ),
}  # fmt: skip

SLIDERS = {  # label, minimum, maximum, step
    "alpha": ("α: acceptance rate", 0, 1, 0.01),
    "c": ("c: draft token (steps)", 0, 2, 0.01),
    "gamma": ("γ: draft length (tokens)", 1, 16, 1),
    "v": ("v: verification (steps)", 0.5, 5, 0.01),
    "o": ("o: overhead (steps)", 0, 2, 0.01),
    "c_hat": ("ĉ: draft operations", 0, 2, 0.01),
}
_INTRO = """Speed depends on the acceptance rate α and the cost of steps. Costs are relative to a baseline step: c per
draft token, v for verifying γ + 1 rows, o for overhead. ĉ: operations per draft token. Dots show the sliders and *this
run*. *Leviathan et al. 2211.17192, Figures 2 to 4.*"""
_TWO_ALPHAS = """### Two definitions of α
α is the acceptance probability per *tested* token. It does not depend on γ. Other reports define α as accepted /
drafted. That ratio falls as γ grows: tokens after a rejection are not tested. Here, α = """
_FORMULAS = """Tokens per pass: (1 − α^(γ+1)) / (1 − α). Speed-up: tokens / (γc + 1) by Theorem 3.8, or
tokens / (v + γc + o). Operations per token: Theorem 3.11. Memory accesses per token, for the target's weights and KV
cache: section 3.4."""
KINDS = {  # words, colour
    "prompt": ("prompt", "var(--line)"),
    "draft": ("drafter call", "var(--accepted-ink)"),
    "search": ("draft without a model", "var(--link-wait)"),
    "target": ("target pass", "var(--link-verify)"),
}
_CALLS_INTRO = """### Model calls over time
A row per compared run, to scale: γ drafter calls, then a target pass. Hover a block to see its tokens."""
_HEAD = (
    "γ", "accepted / drafted", "tokens per pass", "speed-up, Theorem 3.8", "speed-up with v and o", "operations",
    "memory accesses",
)  # fmt: skip
_MAX_GAMMA = 64


def describe_settings(at: Coefficients) -> str:
    """Return the best draft lengths and the bound of Corollary 3.9."""
    alpha, c = at.alpha, at.c
    best, theorem_best = at.best_gamma(_MAX_GAMMA), theory.best_gamma(alpha, c, _MAX_GAMMA)
    theorem = theory.walltime_improvement(alpha, theorem_best, c)
    thumb = f" The rule of thumb √(1/c − 1) = {theory.thumb_gamma(c):.1f} ignores α." if c else ""
    bound = "α ≤ c: no γ improves the speed (Corollary 3.9). Use autoregressive decoding."
    if theory.can_improve(alpha, c):
        bound = (
            f"α > c: the best γ yields at least (1 + α) / (1 + c) = {theory.least_improvement(alpha, c):.2f}×. "
            "This bound requires v = 1 and o = 0 (Corollary 3.9)."
        )
    return (
        f"- Best γ: **{_gamma_text(best)}** with v and o ({at.at_gamma(best).speedup:.2f}×), "
        f"{_gamma_text(theorem_best)} by Theorem 3.8 ({theorem:.2f}×).{thumb}\n- {bound}"
    )


def _gamma_text(gamma: int) -> str:
    return "0, the baseline" if not gamma else f"{gamma} or more" if gamma == _MAX_GAMMA else str(gamma)


def figures_by_gamma(at: Coefficients, run: TheoryPoint | None) -> str:
    """Return the closed forms by draft length, and of a run, below its measurements."""
    rows = [_closed_forms(f"{gamma:g}", at.at_gamma(gamma)) for gamma in sorted({1, 2, 3, 4, 6, 8, 12, 16, at.gamma})]
    if run:
        own = run.coefficients
        measured = (run.share, run.tokens, None, run.speedup, run.operations, None)
        rows.append((f"**this run**, {own.gamma:.2f}: measured", *measured))
        rows.append(_closed_forms(f"**this run**, {own.gamma:.2f}: closed forms", own))
    return f"{_TWO_ALPHAS}{at.alpha:g}.\n\n{figures_table(_HEAD, rows)}\n\n{_FORMULAS}"


def _closed_forms(label: str, at: Coefficients) -> tuple[object, ...]:
    return (
        label,
        theory.accepted_share(at.alpha, at.gamma),
        theory.expected_tokens(at.alpha, at.gamma),
        theory.walltime_improvement(at.alpha, at.gamma, at.c),
        at.speedup,
        theory.operations(at.alpha, at.gamma, at.c_hat),
        theory.memory_accesses(at.alpha, at.gamma),
    )


def describe_run(run: TheoryPoint) -> str:
    """Return the coefficients of a run, and its speed-up by the definitions of the papers."""
    at, recipe = run.coefficients, run.lane.recipe
    source = "accepted / tested under its rule" if run.lane.counted else "the mean overlap β = Σ min(p, q) of all tests"
    sentences = [
        f"**This run** ({escape_markdown(recipe['method'])}, T {recipe['temperature']:g}): α = {at.alpha:.3f}, "
        f"estimated by {source}; accepted / drafted = {run.share:.3f}; γ = {at.gamma:.2f} draft tokens per step."
    ]
    if run.disturbed:
        sentences.append(f"c, v, o and the speed-up are {NOT_MEASURABLE}: another program used the processor.")
    elif math.isnan(at.c):
        sentences.append("Without an AR baseline c, v, o and the speed-up are unknown: tick *Compare* and run again.")
    else:
        sentences.append(
            f"In AR steps, a draft token took c = {at.c:.3f}, a verification pass v = {at.v:.2f}, and the host "
            f"o = {at.o:.2f} per step."
        )
    theorem = theory.walltime_improvement(at.alpha, at.gamma, at.c)
    if run.speedup > 0 and theorem > 0:
        sentences.append(
            f"The run was **{run.speedup:.2f}×** as fast as AR decoding, {run.speedup / theorem:.0%} of Theorem 3.8. "
            f"The theorem gives this speed-up for α = {theory.alpha_of_speedup(run.speedup, at.gamma, at.c):.2f}. The "
            f"formula (1 + γα) / (1 + γc) predicts {theory.share_speedup(run.share, at.gamma, at.c):.2f}×."
        )
    if not run.chains:
        sentences.append("The drafts were trees, and γ counts their nodes: the curves for chains do not apply exactly.")
    return " ".join(sentences)


def slider_values(measured: Coefficients) -> list[float]:
    """Clamp measurements to the sliders; use defaults for unknown values."""
    values = []
    for name, (_, minimum, maximum, step) in SLIDERS.items():
        value = getattr(measured, name)
        value = getattr(Coefficients, name) if math.isnan(value) else min(maximum, max(minimum, value))
        values.append(round(value) if step == 1 else round(value, 2))
    return values


# --- model calls over time, a row per lane, to scale (2211.17192, Figure 5) -------------------------------------------


def calls(lane: Lane, first_token: int = 0) -> list[Block]:
    """Return the calls from the step that commits token `first_token` on, since the start of the lane.

    A trace has the time of a draft, so its calls get equal shares. Encoders run in the first call of their model.
    """
    ends = list(accumulate(len(event.step.tokens) for event in lane.steps))
    encoder = lane.header is not None and lane.header.encoder
    result: list[Block] = []
    finished = 0.0
    for event, end in zip(lane.steps, ends, strict=True):
        step = event.step
        if end > first_token:
            start = max(finished, step.t - sum(step.seconds))
            result += _draft_calls(event, start)
            result.append(_target_call(event, start + step.seconds.draft, encoder))
        finished = step.t
    return [call for call in result if call.duration > 0]


def _draft_calls(event: StepEvent, start: float) -> Iterator[Block]:
    draft, seconds = event.step.draft, event.step.seconds.draft
    if not draft.tokens:
        return
    if draft.origin and draft.origin[0].source not in (MODEL.source, HEAD.source):
        yield _call("search", start, seconds, f"draft without a model: {_words(event, range(len(draft)))}")
        return
    levels: dict[int, list[int]] = defaultdict(list)
    for node in range(len(draft)):
        levels[len(draft.path(node))].append(node)
    share = seconds / len(levels)
    for depth, nodes in levels.items():
        words = f"drafter call {depth} of {len(levels)}: {_words(event, nodes)}"
        yield _call("draft", start + (depth - 1) * share, share, words)


def _target_call(event: StepEvent, start: float, encoder: bool) -> Block:
    step, rows = event.step, len(event.step.draft) + 1
    passed = f"target pass over {rows} row{'' if rows == 1 else 's'}"
    if step.i == 0:
        passed = "encoder and first pass" if encoder else "prompt"
    committed = ", ".join(f"{shown.text!r} {shown.outcome}" for shown in event.shown() if shown.outcome.committed)
    return _call("target" if step.i else "prompt", start, step.seconds.verify, f"{passed}: {committed}")


def _words(event: StepEvent, nodes: Sequence[int]) -> str:
    return ", ".join(f"{event.draft_texts[node]!r} {event.step.outcome(node)}" for node in nodes)


def _call(kind: str, start: float, seconds: float, words: str) -> Block:
    return Block(0, kind, 1000 * start, 1000 * seconds, f"{words} ({1000 * seconds:.2f} ms)")


def call_timeline(lanes: Sequence[Lane], first_token: int, tokens: int) -> str:
    """Draw the local lanes; the slowest shows about `tokens` tokens."""
    local = [lane for lane in lanes if lane.steps and lane.timed and not lane.recipe.get("cloud")]
    rows = [(lane, row) for lane in local if (row := calls(lane, first_token))]
    span = max((_end(lane, first_token + tokens) - row[0].start for lane, row in rows), default=0.0)
    blocks = []
    for i, (_, row) in enumerate(rows):
        for call in row:
            start = call.start - row[0].start
            if start < span:  # cut at the end of the time axis
                blocks.append(replace(call, row=i, start=start, duration=min(call.duration, span - start)))
    return timeline("Model calls over time", [lane.title for lane, _ in rows], blocks, KINDS) if blocks else ""


def _end(lane: Lane, token: int) -> float:
    """Return the time of a token, by default the last."""
    ends = accumulate(len(event.step.tokens) for event in lane.steps)
    times = [event.step.t for event, end in zip(lane.steps, ends, strict=True) if end >= token]
    return 1000 * (times[0] if times else lane.steps[-1].step.t)


# --- tab ---------------------------------------------------------------------------------------------------------


def theory_tab(tab: gr.Tab, views: RunViews) -> None:
    gr.Markdown(link_papers(_INTRO))
    with gr.Row(elem_classes="grid"):
        sliders = [_slider(name, *SLIDERS[name]) for name in SLIDERS]
    set_sliders = gr.Button("Set sliders to this run", size="sm", scale=0, min_width=260, elem_id="theory-set")
    run_text, settings_text = gr.Markdown(elem_id="theory-run"), gr.Markdown(elem_id="theory-words")
    plots = chart_view("theory-plots", *THEORY_PLOTS)
    by_gamma = gr.Markdown(elem_id="theory-by-gamma", elem_classes="figures")
    with gr.Accordion("Published tables", open=False, elem_id="theory-papers"):
        gr.Markdown(link_papers(published_figures()), elem_classes="figures")
    _calls_section(views)
    worked_example(tab)

    def draw(run: Run | None, *values: Any) -> Any:
        if not all(is_number(value, *SLIDERS[name][1:3]) for name, value in zip(SLIDERS, values, strict=True)):
            return gr.skip()  # an incomplete number
        at = Coefficients(**dict(zip(SLIDERS, values, strict=True)))
        point: TheoryPoint | None = None
        try:
            point = point_of(run)
            text = describe_run(point)
        except UserError as error:
            text = f"*{error}.*"
        charts = "".join(plot.chart(name, at, point) for name, plot in THEORY_PLOTS.items())
        return text, describe_settings(at), charts, figures_by_gamma(at, point)

    def set_to_run(run: Run | None) -> Any:
        try:
            return slider_values(point_of(run).coefficients)
        except UserError as error:
            gr.Info(f"{error}.")
            return gr.skip()

    views.connect_run([slider.change for slider in sliders], draw, sliders, [run_text, settings_text, plots, by_gamma])
    views.connect([set_sliders.click], set_to_run, [], sliders)


def _slider(name: str, label: str, low: float, high: float, step: float) -> gr.Slider:
    elem_id = f"theory-{name.replace('_', '-')}"
    return gr.Slider(low, high, getattr(Coefficients, name), step=step, label=label, elem_id=elem_id)


def _calls_section(views: RunViews) -> None:
    gr.Markdown(_CALLS_INTRO)
    with gr.Row():
        first = gr.Slider(0, 200, 0, step=1, label="First token", min_width=220, elem_id="theory-calls-first")
        count = gr.Slider(4, 64, 16, step=4, label="Tokens", min_width=220, elem_id="theory-calls-count")
    drawn = gr.HTML(elem_id="theory-calls", apply_default_css=False)

    def draw(run: Run | None, start: Any, tokens: Any) -> Any:
        if not (is_number(start, 0, 1000) and is_number(tokens, 0, 1000)):
            return gr.skip()
        if run is None or not run.over:
            return "<p>No run available: press Run, tick Compare, and add other draft lengths.</p>"
        lanes, length = list(run.lanes.values()), max(1, int(tokens))
        if picture := call_timeline(lanes, int(start), length):
            return picture
        if call_timeline(lanes, 0, length):
            return "<p>The run ends before this token: choose an earlier first token.</p>"
        return "<p>No lane has times of local steps: choose mode off and no external engine, then press Run.</p>"

    views.connect_run([first.change, count.change], draw, [first, count], [drawn])
