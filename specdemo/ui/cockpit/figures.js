// All steps of a lane: acceptance by position, time per step, estimated speed by draft length, and a table with its CSV file.

import { drawChart } from "./charts.js";
import { bar, make, visibleText, withNoun } from "./elements.js";
import { $, current, laneName, lanes } from "./state.js";
import { acceptedCount, draftSize } from "./steps.js";

/** Show charts and table of a lane; `inspect` is called with the number of a chosen step. */
export function showFigures(name, inspect) {
  const { metrics, what_if, why_not, ledger } = current.frame.figures[name];
  const rows = stepTable(lanes[name]);
  $("#chart-positions").replaceChildren(chartPositions(metrics));
  $("#chart-times").replaceChildren(chartTimes(rows));
  $("#ledger").replaceChildren(ledgerTable(ledger));
  $("#chart-whatif").replaceChildren(chartWhatIf(what_if, why_not));
  const textColumn = COLUMNS.indexOf("text");
  const order = [0, textColumn, ...COLUMNS.keys()].filter((k, i, all) => all.indexOf(k) === i); // the text beside its step
  const kind = (k) => (k === textColumn ? "text" : null);
  const head = make("thead", {}, make("tr", {}, ...order.map((k) => make("th", { scope: "col", class: kind(k), text: COLUMNS[k].replace(/_/g, " ").replace("round", "step") }))));
  const body = make("tbody");
  for (const cells of rows) {
    const text = (k) => (cells[k] === null ? "–" : k === textColumn ? visibleText(cells[k]) : String(cells[k]));
    const open = make("button", { type: "button", class: "small", text: text(0), "aria-label": `Inspect step ${text(0)}` });
    const row = make("tr", {}, make("td", {}, open), ...order.slice(1).map((k) => make("td", { class: kind(k), text: text(k) })));
    row.addEventListener("click", () => inspect(cells[0]));
    body.append(row);
  }
  $("#rounds").replaceChildren(make("caption", { text: `${laneName(name)}: ${$(".title", lanes[name].box).textContent}` }), head, body);
}

export const PARTS = ["draft", "verify", "host"]; // of the time of a step
export const PART_WORDS = { draft: "guessing", verify: "checking", host: "the rest" };
const PART_COLOURS = ["var(--quiet)", "var(--correction-ink)", "var(--rejected-ink)"];
const MAX_TIME_BARS = 120;

function quiet(text) { return make("p", { class: "quiet", text }); }

function chartPositions({ accepted_by_position: accepted, tested_by_position: counts }) {
  const positions = counts.map((count, k) => [accepted[k] / count, count]).filter(([, count]) => count);
  if (!positions.length) return quiet("No guess was checked.");
  const points = positions.map(([share, tested], i) => [i, 100 * share, `position ${i + 1}: ${(100 * share).toFixed(0)} % of ${tested} checked`]);
  const description = positions.map(([share], i) => `${i + 1}: ${(100 * share).toFixed(0)} %`).join(", ");
  const series = [{ kind: "bar", name: "accepted", colour: "var(--accepted-ink)", points }];
  const label = `Share of checked guesses that were accepted, by position: ${description}`;
  return drawChart({ label, x: "position of the guess (n: number checked)", y: "kept", unit: " %", include: [100], series, names: positions.map(([, tested], i) => `${i + 1} (n ${tested})`) });
}

function chartTimes(rows) { // table rows; beyond MAX_TIME_BARS, adjacent steps are averaged
  const decoded = rows.filter((row) => row[0] > 0);
  if (!decoded.length) return quiet("There were no steps after the first token.");
  if (decoded.some((row) => row[9] === null)) return quiet("The engine does not report the durations of its steps.");
  const perBar = Math.ceil(decoded.length / MAX_TIME_BARS);
  const groups = Array.from({ length: Math.ceil(decoded.length / perBar) }, (_, i) => decoded.slice(i * perBar, (i + 1) * perBar));
  const total = PARTS.map((_, k) => decoded.reduce((sum, row) => sum + row[9 + k], 0));
  const series = PARTS.map((part, k) => ({
    kind: "bar", name: part, colour: PART_COLOURS[k], label: `${PART_WORDS[part]} ${(total[k] / decoded.length).toFixed(2)} ms`,
    points: groups.map((group, i) => {
      const ms = group.reduce((sum, row) => sum + row[9 + k], 0) / group.length;
      return [i + 1, ms, `step ${group[0][0]}: ${PART_WORDS[part]} ${ms.toFixed(2)} ms`];
    }),
  }));
  const totals = PARTS.map((part, k) => `${PART_WORDS[part]} ${total[k].toFixed(0)} ms`).join(", ");
  return drawChart({ label: `Time per step. Total: ${totals}`, x: perBar > 1 ? `groups of ${perBar} steps, n ${decoded.length}` : `step, n ${decoded.length}`, y: "ms", series });
}

function chartWhatIf(estimate, reason) { // rows: gamma, tokens per pass, tokens/s, range of 95 % of the runs
  if (!estimate) return quiet(reason);
  const { rows, gamma, measured, fits, better } = estimate;
  const best = rows.find(([g]) => g === better);
  const dots = rows.map(([g, passes, rate, low, up]) => [g, rate, `${withNoun(g, "guess")}: ${rate.toFixed(1)} tokens/s (${low.toFixed(1)}–${up.toFixed(1)}), ${passes.toFixed(2)} per pass`]);
  const series = [
    { kind: "band", colour: "var(--ink)", points: rows.map(([g, , , low, up]) => [g, low, up]) },
    { kind: "line", colour: "var(--ink)", points: dots },
    { kind: "dot", colour: "var(--ink)", fill: "var(--paper)", size: 3, points: dots },
    { kind: "dot", colour: "var(--ink)", points: dots.filter(([g]) => g === better) },
    { kind: "cross", colour: "var(--rejected-ink)", points: gamma === null ? [] : [[gamma, measured, `measured: ${measured.toFixed(1)} tokens/s`]] },
  ];
  const verdict = !fits ? "No advice: the estimate misses the measured speed." : best ? `Estimated best: ${withNoun(best[0], "guess")} at a time, ${best[3].toFixed(0)}–${best[4].toFixed(0)} tokens/s.` : "No other number of guesses is clearly faster.";
  const summary = `${verdict} Measured${gamma === null ? ":" : ` (+): ${withNoun(gamma, "guess")},`} ${measured.toFixed(0)} tokens/s.`;
  const table = make("table", { class: "other" }, make("tr", {}, ...["guesses", "tokens per pass", "tokens/s", "95 % of runs"].map((text) => make("th", { text, scope: "col" }))),
    ...rows.map(([g, passes, rate, low, up]) => make("tr", {}, ...[g, passes.toFixed(2), rate.toFixed(1), `${low.toFixed(1)}–${up.toFixed(1)}`].map((text) => make("td", { text: String(text) })))));
  return make("div", {}, drawChart({ label: summary, x: "guesses at a time", y: "tokens/s", include: [0], series }), make("p", { text: summary }), table);
}

function ledgerTable(ledger) { // rows: share of the wall time, name, and cells
  if (!ledger) return quiet("The engine does not report the durations of its steps.");
  const rows = ledger.rows.map(([share, name, ...cells]) => {
    const track = make("div", { class: "track" }, bar(share, "p"));
    return make("tr", {}, make("th", { text: name, scope: "row" }), make("td", { class: "share" }, track), ...cells.map((text) => make("td", { text })));
  });
  return make("div", {}, make("table", { class: "other ledger" }, ...rows), make("p", { text: `${ledger.wall_s.toFixed(3)} s from the start to the last token` }));
}

// --- table of the steps ----------------------------------------------------------------------------------------------

const COLUMNS = ["round", "t_s", "gamma", "drafted", "tested", "accepted", "committed", "ends_with", "mean_beta", "draft_ms", "verify_ms", "host_ms", "text"];
const FRACTIONS = new Set(["t_s", "mean_beta", "draft_ms", "verify_ms", "host_ms"]);

function stepTable({ head, records }) { // a row of values per step, null if unknown
  return records.map((record) => {
    const { step } = record;
    const times = [step.draft_s, step.verify_s, step.host_s].map((seconds) => (seconds === null ? null : rounded(1000 * seconds, 3)));
    const counts = [draftSize(step), testedCount(record), acceptedCount(record), step.tokens.length];
    return [step.i, rounded(record.at, 4), head.drafts ? step.gamma : null, ...counts, step.kind, meanBeta(step), ...times, step.text];
  });
}

export function asCsv(lane) { // texts are JSON strings, which spreadsheets do not evaluate as formulas
  const quoted = (text) => `"${JSON.stringify(text).replaceAll('"', '""')}"`;
  const cell = (value, name) => {
    if (value === null) return "";
    if (name === "text") return quoted(value);
    return FRACTIONS.has(name) && Number.isInteger(value) ? value.toFixed(1) : String(value);
  };
  const rows = stepTable(lane).map((row) => row.map((value, k) => cell(value, COLUMNS[k])));
  return [COLUMNS, ...rows].map((row) => `${row.join(",")}\n`).join("");
}

function rounded(x, digits) { return Number(x.toFixed(digits)); }

function meanBeta({ beta }) {
  const known = beta.filter((value) => value !== null);
  return known.length ? rounded(known.reduce((sum, value) => sum + value, 0) / known.length, 3) : null;
}

function testedCount(record) {
  const { step } = record;
  if (step.undisclosed === undefined) return step.beta.filter((beta) => beta !== null).length;
  return acceptedCount(record) + Number(step.undisclosed > 0 && step.token !== null);
}
