"""Theory tab, which plots the closed forms. Only published measurements are quoted; other values are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import gradio as gr

from specdemo.core import theory
from specdemo.core.errors import UserError
from specdemo.core.published import LEVIATHAN_2
from specdemo.ui.call_timeline import call_timeline
from specdemo.ui.frames import Run
from specdemo.ui.labels import escape_markdown, figures_table, link_papers
from specdemo.ui.run_store import RunStore
from specdemo.ui.tabs.components import SHOWN_RUN_JS, UNPROCESSED, chart_view
from specdemo.ui.tabs.worked_example import residual_example
from specdemo.ui.theory_curves import (
    SLIDERS,
    THEORY_PLOTS,
    TheoryPoint,
    TheorySettings,
    describe_settings,
    parse_settings,
    point_of,
    point_words,
    settings_from_run,
)

# 2211.17192, Table 1: alpha and gamma at c = 0.
_LEVIATHAN_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))

# 2302.01318, Table 1: Chinchilla 70B with a drafter of 4B on 16 TPU v4. Task, measured speed-up.
_CHEN = (("XSum, nucleus", 1.92), ("XSum, greedy", 2.01), ("HumanEval, nucleus", 2.46))
_CHEN_GAMMA, _CHEN_COST = 4, 0.128

_GUIDE_COST = 0.1
_GUIDE = ((2, 0.8), (4, 0.7), (6, 0.6), (8, 0.5))  # gamma and accepted / drafted, assumed by the practice guide
_INTRO = """Speed depends on the acceptance rate α and the cost of steps. Costs are relative to a baseline step: c per
draft token, v for verifying γ + 1 rows, o for overhead. ĉ: operations per draft token. Dots show the sliders and *this
run*. *Leviathan et al. 2211.17192, Figures 2 to 4.*"""
_CALLS_INTRO = """### Model calls over time
A row per compared run, to scale: γ drafter calls, then a target pass. Hover a block to see its tokens."""


def gamma_table(settings: TheorySettings, run: TheoryPoint | None) -> str:
    alpha = settings.alpha
    rows: list[Sequence[object]] = [
        (
            gamma,
            theory.accepted_share(alpha, gamma),
            theory.expected_tokens(alpha, gamma),
            theory.walltime_improvement(alpha, gamma, settings.c),
            settings.modelled_speedup(gamma),
            theory.operations(alpha, gamma, settings.c_hat),
        )
        for gamma in sorted({1, 2, 3, 4, 6, 8, 12, 16, settings.gamma})
    ]
    head = ("γ", "accepted / drafted", "tokens per pass", "Theorem 3.8", "with v and o", "operations")
    if run:
        rows.append((_run_label(run.gamma), run.share, run.tokens, run.theorem, run.speedup, run.operations))
    note = " The last row is this run: measured, except Theorem 3.8." if run else ""
    return (
        f"α = {alpha:g} is the acceptance probability per *tested* token. It does not depend on γ. "
        "Other reports define α as accepted / drafted. That ratio falls as γ grows: tokens after a rejection are "
        f"not tested.{note}\n\n{figures_table(head, rows)}"
    )


@dataclass(frozen=True)
class PaperTable:
    """Published figures, with a row of the run."""

    text: str
    head: Sequence[str]
    published: Sequence[Sequence[object]]
    measured: Callable[[TheoryPoint], Sequence[object]]

    def markdown(self, run: TheoryPoint | None) -> str:
        rows = [*self.published, *([self.measured(run)] if run else [])]
        return f"{self.text}\n\n{figures_table(self.head, rows)}"


def _guide_row(label: object, gamma: float, share: float, c: float | None) -> Sequence[object]:
    """Convert accepted / drafted to alpha; both formulas yield the same speed-up."""
    alpha = theory.alpha_of_share(share, gamma)
    by_share = None if c is None else theory.share_speedup(share, gamma, c)
    by_alpha = None if c is None else theory.walltime_improvement(alpha, gamma, c)
    return label, share, c, by_share, alpha, by_alpha


def _chen_row(label: object, gamma: float, c: float | None, speedup: float | None) -> Sequence[object]:
    alpha = None if c is None or not speedup else theory.alpha_of_speedup(speedup, gamma, c)
    return label, gamma, c, speedup, alpha


def _leviathan_2_row(
    task: str, drafter: str, temperature: float, gamma: int, alpha: float, c: float, measured: float
) -> Sequence[object]:
    theorem = theory.walltime_improvement(alpha, gamma, c)
    name = f"{task}, T5-{drafter}"
    return name, str(temperature), gamma, alpha, c, f"{measured:.1f}", theorem, f"{measured / theorem:.0%}"


def _run_row_2(run: TheoryPoint) -> Sequence[object]:
    realised = f"{run.speedup / run.theorem:.0%}" if run.speedup and run.theorem else None
    label, temperature = _run_label(escape_markdown(run.method)), f"{run.temperature:g}"
    return label, temperature, run.gamma, run.alpha, run.c, run.speedup, run.theorem, realised


def _run_label(value: object) -> str:
    return f"**this run**, {value:.2f}" if isinstance(value, float) else f"**this run**, {value}"


PAPER_TABLES = {
    "guide": PaperTable(
        "The practice guide defines α as accepted / drafted. The table converts it to α per tested token. "
        "Each formula is correct for its definition of α.",
        ("γ", "accepted / drafted", "c", "(1 + γα) / (1 + γc)", "α per tested token", "Theorem 3.8"),
        [_guide_row(gamma, gamma, share, _GUIDE_COST) for gamma, share in _GUIDE],
        lambda run: _guide_row(_run_label(run.gamma), run.gamma, run.share, run.c),
    ),
    "leviathan 1": PaperTable(
        "Leviathan et al., Table 1, computed for c = ĉ = 0. The row of a run includes its drafting cost.",
        ("α", "γ", "operations", "speed-up"),
        [
            (alpha, gamma, theory.operations(alpha, gamma, 0), theory.walltime_improvement(alpha, gamma, 0))
            for alpha, gamma in _LEVIATHAN_1
        ],
        lambda run: (_run_label(run.alpha), run.gamma, run.operations, run.speedup),
    ),
    "leviathan 2": PaperTable(
        "Leviathan et al., Table 2: T5-XXL on a TPU v4, batch size 1. Speed-ups are measured by the authors; "
        "Theorem 3.8 is computed.",
        ("task, drafter", "T", "γ", "α", "c", "measured", "Theorem 3.8", "realised"),
        [_leviathan_2_row(*row) for row in LEVIATHAN_2],
        _run_row_2,
    ),
    "chen": PaperTable(
        "Chen et al. 2302.01318, Table 1: Chinchilla 70B with a drafter of 4B, batch size 1. Speed-ups are measured "
        "by the authors. The last column is computed: the α that explains the speed-up.",
        ("task", "γ", "c", "measured", "α for Theorem 3.8"),
        [_chen_row(task, _CHEN_GAMMA, _CHEN_COST, measured) for task, measured in _CHEN],
        lambda run: _chen_row(_run_label(escape_markdown(run.method)), run.gamma, run.c, run.speedup),
    ),
}


def theory_tab(runs: RunStore, tab: gr.Tab) -> None:
    gr.Markdown(link_papers(_INTRO))
    shown_id = gr.Textbox(visible=False)
    sliders = _sliders()
    with gr.Row():
        set_sliders = gr.Button("Set sliders to this run", size="sm", scale=0, min_width=260, elem_id="theory-set")
    run_text, settings_text = gr.Markdown(elem_id="theory-run"), gr.Markdown(elem_id="theory-words")
    plots = _plots()
    gr.Markdown("### Two definitions of α")
    table_by_gamma = gr.Markdown(elem_id="theory-by-gamma", elem_classes="figures")
    with gr.Accordion("Published tables and this run", open=False, elem_id="theory-papers"):
        paper_tables = [gr.Markdown(elem_classes="figures") for _ in PAPER_TABLES]
    _calls_section(runs, shown_id, tab)
    residual_example(tab)

    def measured(run_id: Any, request: gr.Request) -> tuple[TheoryPoint | None, str]:
        try:
            run = point_of(runs.get(run_id) or runs.latest(request.session_hash or ""))
        except UserError as error:
            return None, f"*{error}.*"
        return run, point_words(run)

    def draw(request: gr.Request, run_id: Any, *values: Any) -> Any:
        settings = parse_settings(values)
        if settings is None:
            return gr.skip()
        run, text = measured(run_id, request)
        charts = (plot.chart(settings, run) for plot in THEORY_PLOTS)
        papers = (table.markdown(run) for table in PAPER_TABLES.values())
        words = (text, describe_settings(settings))
        return [*words, *charts, gamma_table(settings, run), *papers]

    def set_to_run(request: gr.Request, run_id: Any) -> Any:
        run, text = measured(run_id, request)
        if run is None:
            gr.Info(text)
            return gr.skip()
        return list(astuple(settings_from_run(run)))

    drawn = [run_text, settings_text, *plots, table_by_gamma, *paper_tables]
    triggers = [tab.select, *(slider.change for slider in sliders)]
    shown: dict[str, Any] = {"js": SHOWN_RUN_JS, **UNPROCESSED}
    gr.on(triggers, draw, [shown_id, *sliders], drawn, trigger_mode="always_last", **shown)
    set_sliders.click(set_to_run, shown_id, sliders, **shown).then(draw, [shown_id, *sliders], drawn, **shown)


def calls_view(run: Run | None, first_token: int, tokens: int) -> str:
    if run is None or not run.over:
        return "<p>No run available: press Run, tick Compare, and add other draft lengths.</p>"
    lanes = list(run.lanes.values())
    if picture := call_timeline(lanes, first_token, tokens):
        return picture
    if call_timeline(lanes, 0, tokens):
        return "<p>The run ends before this token: choose an earlier first token.</p>"
    return "<p>No lane has times of local steps: choose mode off and no external engine, then press Run.</p>"


def _calls_section(runs: RunStore, shown_id: gr.Textbox, tab: gr.Tab) -> None:
    gr.Markdown(_CALLS_INTRO)
    with gr.Row():
        first = gr.Slider(0, 200, 0, step=1, label="First token", min_width=220, elem_id="theory-calls-first")
        count = gr.Slider(4, 64, 16, step=4, label="Tokens", min_width=220, elem_id="theory-calls-count")
    picture = gr.HTML(elem_id="theory-calls", apply_default_css=False)

    def draw(request: gr.Request, run_id: Any, start: Any, tokens: Any) -> Any:
        if not all(isinstance(value, (int, float)) and 0 <= value <= 1000 for value in (start, tokens)):
            return gr.skip()
        run = runs.get(run_id) or runs.latest(request.session_hash or "")
        return calls_view(run, int(start), max(1, int(tokens)))

    triggers, inputs = [tab.select, first.change, count.change], [shown_id, first, count]
    gr.on(triggers, draw, inputs, picture, js=SHOWN_RUN_JS, trigger_mode="always_last", **UNPROCESSED)


def _plots() -> list[gr.HTML]:
    plots = []
    for first in range(0, len(THEORY_PLOTS), 2):
        with gr.Row():
            plots += [chart_view(plot.elem_id) for plot in THEORY_PLOTS[first : first + 2]]
    return plots


def _sliders() -> list[gr.Slider]:
    defaults = asdict(TheorySettings())
    names = [*SLIDERS]
    sliders = []
    for first in range(0, len(names), 3):
        with gr.Row():
            for name in names[first : first + 3]:
                label, low, high, step = SLIDERS[name]
                elem_id = f"theory-{name.replace('_', '-')}"
                sliders.append(
                    gr.Slider(low, high, defaults[name], step=step, label=label, min_width=240, elem_id=elem_id)
                )
    return sliders
