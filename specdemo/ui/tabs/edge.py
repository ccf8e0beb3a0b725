"""Edge-cloud tab: charts of a run over a link, comparison of the modes, calibration of gates."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gradio as gr

from specdemo.bench.calibration import Calibration, refuse_without_drafter
from specdemo.core.errors import UserError
from specdemo.core.formats import NOTHING, kilobytes, megabytes, number, percent
from specdemo.core.metrics import percentile
from specdemo.prompts import alternate_classes, load_prompts
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.config import MODES
from specdemo.ui import link_charts
from specdemo.ui.frames import Run
from specdemo.ui.markdown import escape_markdown, figures_table
from specdemo.ui.measurements import calibration_job
from specdemo.ui.service import Service
from specdemo.ui.settings import recipe_of
from specdemo.ui.settings_form import SettingsForm
from specdemo.ui.tabs.bench import Sweep
from specdemo.ui.tabs.components import RunViews, chart_view, is_number
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, Outputs, PanelMeasurement

MODE_TABLE_HEAD = (
    "mode", "TTFT p50 / p95 ms", "total p50 / p95 s", "tokens/s", "speed-up", "CPU peak MB",
    "GPU peak MB, allocated / reserved", "KV MB", "KV share", "up kB", "down kB", "cloud steps", "exact",
)  # fmt: skip
MOST_PROMPTS = 12
_TIMELINE_STEPS = 12
_INTRO = """The edge device runs the drafter; the cloud runs the target. They exchange token ids. Choose a mode under
*Edge and cloud*, then press *Run*."""
_BEST = "### Best draft length over this link\n"
_LOCAL_CLOUD = """Without a service address, a cloud process starts on this machine. The emulated link sets its delay
and bandwidth."""

CALIBRATION_PROMPTS, CALIBRATION_TOKENS = 12, 48
_CALIBRATION = """### Calibrate gates
Measure thresholds for the chosen pair: the hardest fifth of the tokens goes to the cloud.
The controls under *Edge and cloud* are set, and remembered for this pair."""
_HEAD = ("signal", "percentile", "this pair", "guide")
_SET_JS = "(calibrated) => calibrated && window.specdemo.setGates(calibrated)"


def modes_sweep(settings: Mapping[str, Any], device: str, count: Any, max_tokens: Any) -> Sweep:
    """Return a recipe per mode, with the first code prompts. Raises `UserError` for invalid settings."""
    if not is_number(count, 1, MOST_PROMPTS):
        raise UserError(f"prompts must be from 1 to {MOST_PROMPTS}, not {count!r}")
    common = {**settings, "max_tokens": max_tokens, "chat": False}
    alone = {"provisional": False, "gates": []}  # these options require drafts over the link
    varied = [{**common, "mode": mode, **({} if mode == "speculative" else alone)} for mode in MODES]
    recipes, prompts = [recipe_of(values, device) for values in varied], load_prompts(kinds=["code"])
    return Sweep(tuple(recipes), tuple(prompts[: int(count)]))


def mode_rows(sweep: Sweep, records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row per mode. The speed-up compares median total times with cloud only."""
    recipes = {recipe.cloud.mode: recipe for recipe in sweep.recipes if recipe.cloud is not None}
    runs = {mode: [record["runs"][i] for record in records] for i, mode in enumerate(recipes)}
    totals = {mode: [run["ttft_s"] + run["wall_s"] for run in runs[mode]] for mode in recipes}
    base = percentile(totals["cloud_only"], 0.5)
    return [[mode, *_mode_row(recipe, runs[mode], totals[mode], base)] for mode, recipe in recipes.items()]


def _mode_row(recipe: Recipe, runs: Sequence[Mapping[str, Any]], totals: Sequence[float], base: float) -> list[str]:
    ttfts = [run["ttft_s"] for run in runs]
    links = [run.get("remote", {}) for run in runs]
    calls, up, down = (sum(link.get(key, 0.0) for link in links) for key in ("escalated", "bytes_up", "bytes_down"))
    tokens, steps = (sum(run[name] for run in runs) for name in ("tokens", "steps"))
    return [
        f"{1000 * percentile(ttfts, 0.5):.0f} / {1000 * percentile(ttfts, 0.95):.0f}",
        f"{percentile(totals, 0.5):.2f} / {percentile(totals, 0.95):.2f}",
        number(tokens / sum(totals), 1),
        f"{base / percentile(totals, 0.5):.2f}×",
        *_memory_cells(runs),
        kilobytes(up),
        kilobytes(down),
        percent(calls / steps),
        "yes" if plan_run(recipe).exact else "lossy",
    ]


def _memory_cells(runs: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, str]:
    """Return peaks of process and GPU, KV cache, and its share of the peak."""
    cpu, allocated, reserved, kv = (
        max((run.get(name) or 0 for run in runs), default=0)
        for name in ("peak_rss_bytes", "peak_device_bytes", "peak_reserved_bytes", "kv_bytes")
    )
    gpu = f"{megabytes(allocated, 0)} / {megabytes(reserved, 0)}" if allocated else NOTHING
    share = kv / (allocated or cpu) if allocated or cpu else None
    return megabytes(cpu or None, 0), gpu, megabytes(kv, 2), NOTHING if share is None else f"{share:.2%}"


def edge_tab(service: Service, form: SettingsForm, device: str, views: RunViews) -> None:
    gr.Markdown(_INTRO if service.limits.remote is not None else f"{_INTRO} {_LOCAL_CLOUD}")
    _run_section(service, views)
    _modes_section(service, form, device)
    if "gate_nll" in form.defaults:
        calibration_section(service, form, device)


def _run_section(service: Service, views: RunViews) -> None:
    refresh = gr.Button("Refresh", size="sm", scale=0, elem_id="edge-refresh")
    summary = gr.Markdown(elem_id="edge-run")
    allowed = service.limits.remote is None
    kill = gr.Button("End this replica", size="sm", scale=0, elem_id="edge-kill", visible=allowed)
    killed = gr.Markdown(elem_id="edge-killed")
    with gr.Column(visible=False) as details:
        label = f"Timeline: first of {_TIMELINE_STEPS} steps"
        first = gr.Slider(0, 1, 0, step=1, label=label, elem_id="edge-first")
        timeline = gr.HTML(elem_id="edge-timeline", apply_default_css=False)
        head, title = list(link_charts.LINK_TABLE_HEAD), "Measurements per step"
        table = gr.Dataframe(headers=head, label=title, interactive=False, max_height=420, elem_id="edge-table")
        best = gr.Markdown(elem_id="edge-best")
        plot = chart_view("edge-plot")

    def draw(run: Run | None) -> Outputs:
        try:
            lane = link_charts.edge_lane(run)
        except UserError as error:
            return {summary: f"*{html.escape(str(error))}.*", details: gr.Column(visible=False)}
        steps = link_charts.lane_steps(lane)
        shown: Outputs = {
            summary: f"{link_charts.describe_link(lane)}\n\n{link_charts.describe_traffic(lane)}",
            details: gr.Column(visible=True),
            first: gr.Slider(maximum=max(1, len(steps) - _TIMELINE_STEPS), value=0),
            timeline: link_charts.step_timeline(steps, 0, _TIMELINE_STEPS),
            table: link_charts.step_measurements(steps),
        }
        try:
            link = link_charts.link_of(lane)
        except UserError as error:
            return shown | {best: f"{_BEST}*{error}.*", plot: ""}
        return shown | {best: _BEST + link_charts.describe_best_gamma(link), plot: link_charts.speed_chart(link)}

    def move(run: Run | None, start: Any) -> Any:
        try:
            return link_charts.step_timeline(
                link_charts.lane_steps(link_charts.edge_lane(run)), int(start), _TIMELINE_STEPS
            )
        except (UserError, TypeError, ValueError):  # unknown run or incomplete number
            return gr.skip()

    def end_replica(run: Run | None) -> str:
        try:
            return service.kill_replica(run)
        except UserError as error:
            return f"*{html.escape(str(error))}.*"

    views.connect_run([refresh.click], draw, [], [summary, details, first, timeline, table, best, plot])
    views.connect([first.change], move, [first], [timeline])
    views.connect([kill.click], end_replica, [], [killed])


def _modes_section(service: Service, form: SettingsForm, device: str) -> None:
    gr.Markdown(
        "### Compare edge only, cloud only and both\n"
        "All modes continue the same prompts. Models, sampling and link are taken from the settings. "
        "Peaks are those of this process since its start. `benchmarks.edge_cloud modes` starts a process per mode."
    )
    with gr.Row():
        count = gr.Slider(1, MOST_PROMPTS, 3, step=1, label="Prompts", min_width=200, elem_id="modes-prompts")
        length = gr.Slider(8, 128, 48, step=8, label="Tokens per run", min_width=200, elem_id="modes-tokens")
    panel, results = MeasurementPanel.create(service, "modes")
    with results:
        table = gr.Dataframe(headers=list(MODE_TABLE_HEAD), interactive=False, elem_id="modes-table")

    def prepare(session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        prompts, tokens, sent = values
        sweep = modes_sweep(form.complete(sent), device, prompts, tokens)
        return sweep.measurement(service, lambda records: {table: mode_rows(sweep, records)})

    panel.connect([count, length, form.values], [table], prepare)


def calibration_recipe(settings: Mapping[str, Any], device: str) -> Recipe:
    """Return the recipe of the settings, verified on this machine. Raises `UserError`."""
    fixed = {"mode": "off", "external": None, "method": "ar", "max_tokens": CALIBRATION_TOKENS}
    models = recipe_of({**settings, **fixed}, device)
    refuse_without_drafter(models.pair, models.target, models.drafter)
    return replace(models, method="draft")


def describe_calibration(result: Calibration) -> str:
    missing = f" There is no variance: {escape_markdown(result.missing)}." if result.missing else ""
    return (
        f"{result.tokens} draft tokens of {result.texts} texts.{missing}\n\n{figures_table(_HEAD, result.rows())}\n\n"
        f"In the terminal: `{result.flags}`"
    )


def calibration_section(service: Service, form: SettingsForm, device: str) -> None:
    """Lay out the section. The browser sets the thresholds and remembers them by pair."""
    gr.Markdown(_CALIBRATION)
    panel, results = MeasurementPanel.create(service, "gates", "Calibrate", "calibrate")
    with results:
        table = gr.Markdown(elem_id="gates-thresholds", elem_classes="figures")
    calibrated = gr.JSON(visible=False)

    def prepare(session: str, values: tuple[Any, ...]) -> PanelMeasurement:
        settings = form.complete(values[0])
        recipe = calibration_recipe(settings, device)
        prompts = alternate_classes(load_prompts((), recipe.chat))[:CALIBRATION_PROMPTS]

        def show(results: list[Calibration]) -> Outputs:
            if not results:
                return {}
            gates = {f"gate_{name}": threshold for name, threshold in results[0].thresholds.items()}
            return {table: describe_calibration(results[0]), calibrated: {"models": settings, "gates": gates}}

        return PanelMeasurement(calibration_job(service, recipe, prompts), show)

    shown = panel.connect([form.values], [table, calibrated], prepare)
    shown.then(None, calibrated, None, js=_SET_JS, api_visibility="private")
