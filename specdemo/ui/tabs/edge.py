"""Edge-cloud tab: charts of a run over a link, comparison of the modes, calibration of gates."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import gradio as gr

from specdemo.bench.calibration import Calibration, refuse_without_drafter
from specdemo.core.errors import UserError
from specdemo.core.formats import NOTHING, kilobytes, megabytes, number, percent, rate
from specdemo.core.ledger import LINK, parts, time_shares, verification
from specdemo.core.metrics import percentile
from specdemo.core.rules import rule_traits
from specdemo.core.step import Source, Step
from specdemo.core.theory import STAGES, CostTerms, best_gamma, most_bytes_per_token, speedup_over
from specdemo.prompts import alternate_classes, load_prompts
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.config import MODES
from specdemo.ui.frames import Run
from specdemo.ui.lane import Lane, mode, speed
from specdemo.ui.service import Service, calibration_job
from specdemo.ui.settings import recipe_of
from specdemo.ui.settings_form import SettingsForm
from specdemo.ui.tabs.bench import Sweep
from specdemo.ui.tabs.components import (
    Block,
    RunViews,
    Series,
    chart,
    chart_view,
    escape_markdown,
    figures_table,
    is_number,
    timeline,
)
from specdemo.ui.tabs.measurement_panel import MeasurementPanel, Outputs, PanelMeasurement

LINK_TABLE_HEAD = (
    "round", "k", "accepted_len", "la/k", "alpha_mean", "edge_time ms", "cloud_prefill ms", "rtt ms",
    "bytes up", "bytes down", "hard_ratio", "escalated", "cumulative acceptance", "verdict",
)  # fmt: skip
VERDICTS = {Source.PROVISIONAL: "provisional", Source.GATE: "not queried", Source.ALONE: "drafter alone"}
ROWS = ("edge", "link", "cloud")
ACTIVITIES = {  # label, row of the timeline, colour
    "draft": ("drafting", 0, "var(--accepted-ink)"),
    "up": ("sending", 1, "var(--link-up)"),
    "way": ("link delay", 1, "var(--link-delay)"),
    "verify": ("cloud's pass", 2, "var(--link-verify)"),
    "down": ("receiving", 1, "var(--link-down)"),
    "gap": ("failover", 1, "var(--bar-rejected)"),
    "wait": ("waiting", 0, "var(--link-wait)"),
    "idle": ("idle", 0, "var(--line)"),
}
_TOTALS = {"provisional": "committed provisionally", "confirmed": "confirmed", "overruled": "overruled"}
LONGEST = 24  # longest draft of the search, in tokens

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
and loss."""

CALIBRATION_PROMPTS, CALIBRATION_TOKENS = 12, 48
_CALIBRATION = """### Calibrate gates
Measure thresholds for the chosen pair: the hardest fifth of the tokens goes to the cloud.
The controls under *Edge and cloud* are set, and remembered for this pair."""
_HEAD = ("signal", "percentile", "this pair", "guide")
_SET_JS = "(calibrated) => calibrated && window.specdemo.setGates(calibrated)"


# --- a run over a link --------------------------------------------------------------------------------------------


def edge_lane(run: Run | None) -> Lane:
    """Return the first lane with a remote target. Raises `UserError` otherwise."""
    if run is None:
        raise UserError("No run available: choose a mode under Edge and cloud in the settings, then press Run")
    if not run.over:
        raise UserError("A run is in progress: return when it has ended")
    lane = next((lane for lane in run.lanes.values() if mode(lane.recipe) and lane.timed), None)
    if lane is None or not lane.metrics.steps:
        raise UserError("The last run had no cloud: choose a mode under Edge and cloud in the settings, then press Run")
    return lane


def lane_steps(lane: Lane) -> list[Step]:
    return [event.step for event in lane.steps]


def step_measurements(steps: Sequence[Step]) -> list[list[str]]:
    """Return the table of the practice guide, section 9: a total, then a row per step."""
    drafted = list(accumulate(0 if step.unverified else len(step.draft) for step in steps))
    accepted = list(accumulate(step.accepted for step in steps))
    shares = [passed / tried if tried else None for passed, tried in zip(accepted, drafted, strict=True)]
    rows = [_row(str(step.i), [step], share, _note(step)) for step, share in zip(steps, shares, strict=True)]
    return [_row("all", steps, shares[-1] if shares else None, ""), *rows]


def _row(name: str, steps: Sequence[Step], cumulative: float | None, note: str) -> list[str]:
    """Return a row for `steps`: sums of counts, times and bytes; ratios of sums; means of beta and hard ratios."""
    accepted = sum(step.accepted for step in steps)
    verified = sum(len(step.draft) for step in steps if not step.unverified)
    betas = [beta for step in steps for beta in step.betas]
    hard = _noted(steps, "hard_ratio")

    def total(measure: str, digits: int, scale: float = 1.0) -> str:
        values = _noted(steps, measure)
        return number(scale * sum(values) if values else None, digits)

    return [
        name,
        str(sum(len(step.draft) for step in steps)),
        str(accepted),
        number(accepted / verified if verified else None, 2),
        number(sum(betas) / len(betas) if betas else None, 3),
        number(1000 * sum(step.seconds.draft for step in steps), 2),
        total("cloud_s", 2, 1000.0),
        total("rtt_s", 2, 1000.0),
        total("bytes_up", 0),
        total("bytes_down", 0),
        number(sum(hard) / len(hard) if hard else None, 2),
        total("escalated", 0),
        percent(cumulative),
        note,
    ]


def _noted(steps: Sequence[Step], measure: str) -> list[float]:
    return [step.verdict.remote[measure] for step in steps if measure in step.verdict.remote]


def _note(step: Step) -> str:
    link = step.verdict.link
    if link is not None and link.switched:
        return f"continued by {step.verdict.replica or 'another service'}"
    return "two round trips" if link is not None and link.rows else VERDICTS.get(step.verdict.source, "")


def describe_link(lane: Lane) -> str:
    run_steps, m = lane_steps(lane), lane.metrics
    remote: Mapping[str, float] = m.remote
    shares = time_shares(run_steps)
    times = ", ".join(f"{words} {percent(shares[name])}" for name, (words, *_) in ACTIVITIES.items() if name in shares)
    sentences = [
        f"**{escape_markdown(lane.title)}**: {m.tokens} tokens in {m.steps} steps, "
        f"{rate(speed(m, total=True))} tokens per second. {percent(remote.get('escalated', 0.0) / m.steps)} of the "
        "steps queried the cloud. The link carried "
        f"{kilobytes(remote.get('bytes_up', 0.0))} kB up and {kilobytes(remote.get('bytes_down', 0.0))} kB down, "
        "including HTTP headers.",
        f"Time: {times}. The link took {percent(sum(shares.get(name, 0.0) for name in LINK))} of it.",
    ]
    retries = remote.get("sent", 0.0) - sum("sent" in step.verdict.remote for step in run_steps)
    if retries > (rows := remote.get("rows", 0.0)):
        sentences.append(f"Messages sent again: {retries - rows:.0f}.")
    if rows:
        sentences.append(f"Second round trips after rejections, each with a row of q: {rows:.0f}.")
    if switched := remote.get("switched"):
        count, cost = f"{switched:.0f} failover{'s' * (switched > 1)}", remote.get("gap_s", 0.0)
        sentences.append(f"**{count}**: {cost:.2f} s of delay, {remote.get('reread', 0.0):.0f} tokens read again.")
    sentences += [f"Tokens {words}: {remote[name]:.0f}." for name, words in _TOTALS.items() if remote.get(name)]
    return " ".join(sentences)


def describe_traffic(lane: Lane) -> str:
    """Compare bytes per token with the bound of a step; empty without queries of the cloud."""
    recipe, m = lane.recipe, lane.metrics
    sent = m.remote.get("bytes_up", 0.0) + m.remote.get("bytes_down", 0.0)
    if mode(recipe) != "speculative" or not sent or lane.header is None:
        return ""
    run_steps = lane_steps(lane)
    k = max(len(step.draft) for step in run_steps)
    rule, vocab = rule_traits(recipe), lane.header.vocab_size
    sampled = rule.needs_q and any(step.draft.token_probs for step in run_steps)
    entry = {"float16": 2, "scalar": 0}.get((recipe.get("cloud") or {}).get("q_rows", ""), 4)
    rows = (k if rule.chains_only else 1) if sampled and rule.needs_rows and entry else 0
    most = most_bytes_per_token(k, vocab, scalars=sampled, rows=rows, entry_bytes=entry)
    parts = [f"{k} ids", *([f"{k} probabilities"] if sampled else []), *([f"{rows} of q × {vocab:,}"] if rows else [])]
    return (
        f"**Bytes per token:** {sent / m.tokens:,.0f} measured. At most **{most:,}** per token are needed "
        f"({', '.join(parts)}, and 8 down); the rest is HTTP."
    )


def step_timeline(steps: Sequence[Step], first: int, count: int) -> str:
    """Draw `count` steps from index `first`; the marks are accepted / drafted."""
    shown = steps[first : first + count]
    blocks, marks = [], []
    for step, step_parts in zip(shown, parts(steps)[first : first + count], strict=True):
        if not step_parts:
            continue
        start = next((begin for activity, begin, _ in step_parts if activity != "idle"), step_parts[0][1])
        marks.append((1000 * start, f"{step.i}: {step.accepted}/{len(step.draft)}"))
        remote = [(begin, seconds) for activity, begin, seconds in step_parts if ACTIVITIES[activity][1] > 0]
        waits = [("wait", remote[0][0], sum(seconds for _, seconds in remote))] if remote else []
        for activity, begin, seconds in (*step_parts, *waits):
            words, row, _ = ACTIVITIES[activity]
            blocks.append(Block(row, activity, 1000 * begin, 1000 * seconds, f"{words}: {1000 * seconds:.2f} ms"))
    if not blocks:
        return ""
    kinds = {activity: (words, colour) for activity, (words, _, colour) in ACTIVITIES.items()}
    return timeline(f"Steps {shown[0].i} to {shown[-1].i} over time", ROWS, blocks, kinds, marks)


@dataclass(frozen=True)
class LinkModel:
    """Mean costs of the steps of a lane over the link, in seconds."""

    lane: Lane
    alpha: float  # acceptance rate of tested tokens
    terms: CostTerms  # of a step; `v` includes the cloud's pass
    cloud_s: float  # time of the cloud's pass, for any draft length

    @property
    def link_s(self) -> float:
        """Link and host time per step."""
        return self.terms.v - self.cloud_s + self.terms.o

    def speed(self, gamma: float) -> float:
        """S_net in tokens per second."""
        return speedup_over(self.alpha, gamma, self.terms.c, self.link_s, self.cloud_s)

    @property
    def best(self) -> int:
        return best_gamma(self.alpha, self.terms.c, LONGEST, lambda rows: self.cloud_s, self.link_s, plain=None)


def link_of(lane: Lane) -> LinkModel:
    """Average the steps verified in time. Raises `UserError` without such steps."""
    verified = [step for step in lane_steps(lane)[1:] if step.draft.tokens and len(list(verification(step))) > 1]
    drafted = sum(len(step.draft) for step in verified)
    cloud = sum(step.verdict.remote["cloud_s"] for step in verified)
    if lane.acceptance is None or not drafted or not cloud:
        raise UserError("The cloud verified no draft of this run in time, so there is no best length to compute")
    seconds = (sum(getattr(step, name) for step in verified) for name in STAGES)
    terms = CostTerms.of(*seconds, drafted=drafted, steps=len(verified), pass_s=1.0)
    return LinkModel(lane, lane.acceptance, terms, cloud / len(verified))


def speed_chart(link: LinkModel) -> str:
    speeds = [(k, link.speed(k)) for k in range(LONGEST + 1)]
    series = [
        Series("line", "var(--curve-set)", speeds, "S_net"),
        Series("dot", "var(--dot-set)", [(link.best, link.speed(link.best))], "best k"),
    ]
    if measured := link.lane.metrics.tokens_per_second:
        series.append(Series("dot", "var(--dot-run)", [(link.terms.drafted, measured)], "this run"))
    steps = link.lane.metrics.decode_steps
    return chart("Speed by number of guesses", f"guesses at a time, k (n {steps} steps)", "tokens/s", series)


def describe_best_gamma(link: LinkModel) -> str:
    terms, after_first = link.terms, link.lane.metrics.tokens_per_second
    best = f"{link.best} or more" if link.best == LONGEST else str(link.best)
    measured = "" if not after_first else f" (measured after the first token: {after_first:.1f})"
    return (
        "S_net(k) = E[tokens] / (v + k c + RTT), E[tokens] = (1 − α^(k+1)) / (1 − α). Measured in this run: "
        f"{link.lane.acceptance_name} {link.alpha:.2f} for α; c, a draft token, {1000 * terms.c:.2f} ms; v, a cloud "
        f"pass, {1000 * link.cloud_s:.2f} ms for any k; link and host {1000 * link.link_s:.2f} ms per step. "
        f"The run's k of {terms.drafted:.1f} predicts {link.speed(terms.drafted):.1f} tokens per second{measured}. "
        f"**The best k is {best}**, with {link.speed(link.best):.1f}."
    )


# --- comparison of the modes, and the tab --------------------------------------------------------------------------


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
    cpu, allocated, reserved, kv = (
        max((run.get(name) or 0 for run in runs), default=0)
        for name in ("peak_rss_bytes", "peak_device_bytes", "peak_reserved_bytes", "kv_bytes")
    )
    return [
        f"{1000 * percentile(ttfts, 0.5):.0f} / {1000 * percentile(ttfts, 0.95):.0f}",
        f"{percentile(totals, 0.5):.2f} / {percentile(totals, 0.95):.2f}",
        number(tokens / sum(totals), 1),
        f"{base / percentile(totals, 0.5):.2f}×",
        megabytes(cpu or None, 0),
        f"{megabytes(allocated, 0)} / {megabytes(reserved, 0)}" if allocated else NOTHING,
        megabytes(kv, 2),
        f"{kv / (allocated or cpu):.2%}" if allocated or cpu else NOTHING,
        kilobytes(up),
        kilobytes(down),
        percent(calls / steps),
        "yes" if plan_run(recipe).exact else "lossy",
    ]


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
        shown_steps = gr.HTML(elem_id="edge-timeline", apply_default_css=False)
        head, title = list(LINK_TABLE_HEAD), "Measurements per step"
        table = gr.Dataframe(headers=head, label=title, interactive=False, max_height=420, elem_id="edge-table")
        best = gr.Markdown(elem_id="edge-best")
        plot = chart_view("edge-plot")

    def draw(run: Run | None) -> Outputs:
        try:
            lane = edge_lane(run)
        except UserError as error:
            return {summary: f"*{html.escape(str(error))}.*", details: gr.Column(visible=False)}
        steps = lane_steps(lane)
        shown: Outputs = {
            summary: f"{describe_link(lane)}\n\n{describe_traffic(lane)}",
            details: gr.Column(visible=True),
            first: gr.Slider(maximum=max(1, len(steps) - _TIMELINE_STEPS), value=0),
            shown_steps: step_timeline(steps, 0, _TIMELINE_STEPS),
            table: step_measurements(steps),
        }
        try:
            link = link_of(lane)
        except UserError as error:
            return shown | {best: f"{_BEST}*{error}.*", plot: ""}
        return shown | {best: _BEST + describe_best_gamma(link), plot: speed_chart(link)}

    def move(run: Run | None, start: Any) -> Any:
        try:
            return step_timeline(lane_steps(edge_lane(run)), int(start), _TIMELINE_STEPS)
        except (UserError, TypeError, ValueError):  # unknown run or incomplete number
            return gr.skip()

    def end_replica(run: Run | None) -> str:
        try:
            return service.kill_replica(run)
        except UserError as error:
            return f"*{html.escape(str(error))}.*"

    views.connect_run([refresh.click], draw, [], [summary, details, first, shown_steps, table, best, plot])
    views.connect([first.change], move, [first], [shown_steps])
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
            result = results[0]
            gates = {f"gate_{name}": threshold for name, threshold in result.thresholds.items()}
            missing = f" There is no variance: {escape_markdown(result.missing)}." if result.missing else ""
            text = (
                f"{result.tokens} draft tokens of {result.texts} texts.{missing}\n\n"
                f"{figures_table(_HEAD, result.rows())}\n\nIn the terminal: `{result.flags}`"
            )
            return {table: text, calibrated: {"models": settings, "gates": gates}}

        return PanelMeasurement(calibration_job(service, recipe, prompts), show)

    shown = panel.connect([form.values], [table, calibrated], prepare)
    shown.then(None, calibrated, None, js=_SET_JS, api_visibility="private")
