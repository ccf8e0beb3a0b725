// The result: headline, reason and suggestions, figures of the displayed position, costs of passes, the table of runs, and
// the runs on one time axis, a block per step. Blocks, tokens and a sentence are linked by pointer and keyboard.

import { countSteps, drawBlocks, markBlock } from "./charts.js";
import { barRow, make, seconds, setText } from "./elements.js";
import { inspectStep } from "./inspector.js";
import { committedText } from "./lanes.js";
import { exampleNamed } from "./settings.js";
import { $, current, laneName, lanes } from "./state.js";

export function clearHeadline() {
  setText($("#headline"), current.busy ? "Running …" : "");
  $("#headline").dataset.tone = "none";
  for (const part of ["#reason", "#loss"]) setText($(part), "");
  $("#suggestion").replaceChildren();
}

export function showHeadline() {
  const { headline, recorded } = current.frame;
  if (!headline) return;
  const origin = recorded ? (document.body.dataset.example ? "Example: " : "Recorded: ") : "";
  const parts = { origin, ...dividedHeadline() };
  $("#headline").replaceChildren(...Object.entries(parts).map(([name, text]) => make("span", { class: name, text })));
  $("#headline").dataset.tone = headline.tone;
  setText($("#reason"), headline.reason);
  setText($("#loss"), headline.loss);
  const suggestions = recorded ? [] : headline.suggestions;
  const buttons = suggestions.map(({ label }, i) => make("button", { type: "button", class: "small", "data-suggestion": i, text: label }));
  $("#suggestion").replaceChildren(...buttons.filter((_, i) => !suggestions[i].example || exampleNamed(suggestions[i].example)));
}

function dividedHeadline() { // a speed-up at the beginning is displayed large
  const text = current.frame.headline?.text ?? "";
  const [factor] = text.match(/^[\d.]+×/) ?? [""];
  return { factor, words: text.slice(factor.length) };
}

/** Result of the run for a picture: the headline, and the time of each lane. */
export function shownResult() {
  const timed = current.frame.plan.filter((name) => lanes[name].times);
  return { ...dividedHeadline(), rows: timed.map((name) => ({ label: barTitle(name), time: lanes[name].times.at(-1), fast: name === fastestLane() })) };
}

export function showPosition() { // while a part of the text is displayed, the figures are those of this part
  const [name] = current.frame.plan;
  const lane = lanes[name];
  const step = lane.steps[lane.shown - 1];
  const partial = lane.shown < lane.steps.length || current.pending.some((record) => record.step && record.l === name);
  if (!step || !partial) return showTiles(current.frame.tiles);
  const first = lane.steps[0].t ? { t: 0, tokens: 0 } : lane.steps[0]; // over a link the clock begins with the prompt
  const elapsed = step.t - first.t, passes = lane.shown - 1;
  const figures = {
    acceptance: [step.drafted ? `${((100 * step.accepted) / step.drafted).toFixed(0)} %` : "–", `${step.accepted} of ${step.drafted} drafted`],
    tokens_per_pass: [passes ? ((step.tokens - lane.steps[0].tokens) / passes).toFixed(2) : "–", `${passes} steps`],
    tokens_per_second: [elapsed ? ((step.tokens - first.tokens) / elapsed).toFixed(1) : "–", `${step.tokens} tokens displayed`],
    speedup: ["–", "at the end"],
  };
  showTiles({ ...current.frame.tiles, ...figures });
}

function showTiles(tiles) {
  for (const [name, [value, note]] of Object.entries(tiles)) {
    const tile = $(`[data-kpi=${name}]`);
    setText($(".value", tile), value);
    setText($(".note", tile), note);
  }
}

export function showRates() {
  for (const [name, rate] of Object.entries(current.frame.rates)) setText($(".rate", lanes[name].box), rate);
}

export function openTimeline(names) {
  const end = Math.max(...names.map((name) => lanes[name].steps.at(-1).t));
  $("#timeline").hidden = false;
  $("#time-rows").replaceChildren(...names.map((name) => timeRow(name, end)));
  linkStep(null);
}

export function drawPassCosts(costs) { // two bars: a pass that writes one token, and one that checks several
  $("#pass-costs").hidden = !costs;
  if (!costs) return;
  const longest = Math.max(...costs.bars.map(([, s]) => s));
  $("#pass-costs").replaceChildren(make("p", { text: costs.words }), ...costs.bars.map(([name, s]) => barRow(name, s / longest, `${(1000 * s).toFixed(2)} ms`)));
}

export function drawRunTable([head, ...rows]) {
  $("#run-table").hidden = !rows.length;
  if (!rows.length) return;
  const titles = head.map((text) => make("th", { text, scope: "col" }));
  const row = ([name, ...cells]) => make("tr", {}, make("th", { text: name, scope: "row" }), ...cells.map((text) => make("td", { text })));
  $("#run-table table").replaceChildren(make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows.map(row)));
}

function barTitle(name) { return `${laneName(name)}${current.frame.disturbed.includes(name) ? ", times disturbed" : ""}`; }

function fastestLane() { // least time per token; none if the lanes hardly differ or one was disturbed
  const { disturbed, headline, plan } = current.frame;
  if (disturbed.length || headline?.tone === "even") return null;
  const timed = plan.filter((name) => lanes[name].steps.length);
  const perToken = (name) => lanes[name].steps.at(-1).t / lanes[name].steps.at(-1).tokens;
  return timed.reduce((best, name) => (best && perToken(best) <= perToken(name) ? best : name), null);
}

function timeRow(name, end) {
  const { steps } = lanes[name], times = steps.map(({ t }) => t);
  const disturbed = current.frame.disturbed.includes(name), title = barTitle(name);
  const picture = drawBlocks(times, end, `${countSteps(times)} in ${seconds(times.at(-1))}`);
  const bar = make("div", { class: "time-bar", role: "slider", tabindex: 0, "aria-label": `${title}: steps on the time axis`, "aria-valuemin": 0, "aria-valuemax": steps.length - 1, "aria-valuenow": 0 }, picture);
  const step = (e) => { // step under the pointer
    const box = bar.getBoundingClientRect(), t = ((e.clientX - box.left) / box.width) * end;
    return t <= times.at(-1) ? times.findIndex((after) => after >= t) : -1;
  };
  bar.addEventListener("pointermove", (e) => linkStep(name, step(e)));
  bar.addEventListener("pointerleave", () => linkStep(null));
  bar.addEventListener("blur", () => linkStep(null));
  bar.addEventListener("click", (e) => { if (step(e) >= 0) inspectStep(name, step(e)); });
  bar.addEventListener("keydown", (e) => {
    const at = Number(bar.getAttribute("aria-valuenow"));
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: steps.length - 1, Enter: at }[e.key];
    if (next === undefined || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    if (e.key === "Enter") inspectStep(name, at);
    else linkStep(name, Math.max(0, Math.min(next, steps.length - 1)));
  });
  Object.assign(lanes[name], { times, picture, bar, end });
  return make("div", { class: "time-row", "data-row": name, "data-disturbed": disturbed, "data-fastest": name === fastestLane() }, make("span", { class: "time-name", text: title }), bar, make("span", { class: "time-end", text: seconds(times.at(-1)) }));
}

export function closeTimeline() {
  linkStep(null);
  for (const part of ["#timeline", "#pass-costs", "#run-table"]) $(part).hidden = true;
}

function linkStep(name, i = -1) {
  $(".linked-step")?.classList.remove("linked-step");
  for (const { picture, times, end } of Object.values(lanes)) if (picture) markBlock(picture, times, end, -1);
  if (name === null || i < 0) return setText($("#time-words"), "");
  const { steps, times, picture, bar, end } = lanes[name], step = steps[i];
  markBlock(picture, times, end, i);
  step.span.classList.add("linked-step");
  const tokens = step.tokens - (steps[i - 1]?.tokens ?? 0);
  const words = `${i ? `Step ${i} of ${steps.length - 1}, ${seconds(times[i - 1])} to ${seconds(times[i])}` : "First pass"}: ${tokens} token${tokens === 1 ? "" : "s"} ${JSON.stringify(committedText(step.span))}.`;
  bar.setAttribute("aria-valuenow", i);
  bar.setAttribute("aria-valuetext", words);
  setText($("#time-words"), words);
}

export function connectTimeline() {
  for (const [name, { lane }] of Object.entries(lanes)) {
    const stepAt = ({ target }) => { const span = target.closest(".round"); return span && !$("#timeline").hidden ? lanes[name].steps.findIndex((step) => step.span === span) : -1; };
    lane.addEventListener("pointerover", (e) => linkStep(name, stepAt(e)));
    lane.addEventListener("pointerleave", () => linkStep(null));
  }
}
