// Small SVG charts. Each has a text alternative and uses the CSS colours of the page.

import { canvas, make, svg } from "./elements.js";

const WIDTH = 420, HEIGHT = 190, MARGIN_LEFT = 46, MARGIN_BOTTOM = 26, MARGIN_TOP = 10;

const height = (share) => share * (HEIGHT - MARGIN_BOTTOM - MARGIN_TOP);

function axes(top, unit, marks) { // `top`: largest value; `marks`: [x, text] below the chart
  const lines = [];
  for (const share of [0, 0.5, 1]) {
    const y = HEIGHT - MARGIN_BOTTOM - height(share);
    lines.push(svg("line", { x1: MARGIN_LEFT, x2: WIDTH, y1: y, y2: y, class: "grid" }));
    lines.push(svg("text", { x: MARGIN_LEFT - 5, y: y + 4, class: "axis end", text: unit(share * top) }));
  }
  for (const [x, text] of marks) lines.push(svg("text", { x, y: HEIGHT - 8, class: "axis middle", text }));
  return lines;
}

export function chartPositions(positions) {
  if (!positions.length) return make("p", { class: "quiet", text: "No draft tokens were tested." });
  const step = (WIDTH - MARGIN_LEFT) / positions.length;
  const bars = positions.map(([share, tested], i) => svg("rect",
    { x: MARGIN_LEFT + i * step + 0.15 * step, y: HEIGHT - MARGIN_BOTTOM - height(share), width: 0.7 * step, height: height(share), class: "accepted" },
    svg("title", { text: `position ${i + 1}: ${(100 * share).toFixed(0)} % of ${tested} tested` })));
  const description = positions.map(([share], i) => `${i + 1}: ${(100 * share).toFixed(0)} %`).join(", ");
  const marks = positions.map((_, i) => [MARGIN_LEFT + (i + 0.5) * step, String(i + 1)]);
  return canvas(`Share of tested tokens that were accepted, by position in the draft: ${description}`, WIDTH, HEIGHT, ...axes(1, (x) => `${(100 * x).toFixed(0)} %`, marks), ...bars);
}

export const PARTS = ["draft", "verify", "host"]; // of the time of a step
const MAX_BARS = 120;

export function chartTimes(rows) { // table rows; beyond MAX_BARS, adjacent steps are averaged
  const decoded = rows.filter((row) => row[0] > 0);
  if (!decoded.length) return make("p", { class: "quiet", text: "There were no steps after the prefill." });
  if (decoded.some((row) => row[9] === null)) return make("p", { class: "quiet", text: "The engine does not report the durations of its steps." });
  const perBar = Math.ceil(decoded.length / MAX_BARS);
  const groups = [];
  for (let i = 0; i < decoded.length; i += perBar) groups.push(decoded.slice(i, i + perBar));
  const means = groups.map((group) => PARTS.map((_, k) => group.reduce((sum, row) => sum + row[9 + k], 0) / group.length));
  const top = Math.max(...means.map((m) => m[0] + m[1] + m[2]));
  const step = (WIDTH - MARGIN_LEFT) / groups.length;
  const bars = means.flatMap((mean, i) => {
    let base = 0;
    return mean.map((ms, k) => {
      base += ms;
      return svg("rect", { x: MARGIN_LEFT + i * step, y: HEIGHT - MARGIN_BOTTOM - height(base / top), width: Math.max(step - 0.5, 0.5), height: height(ms / top), class: PARTS[k] },
        svg("title", { text: `step ${groups[i][0][0]}: ${PARTS[k]} ${ms.toFixed(2)} ms` }));
    });
  });
  const total = PARTS.map((_, k) => decoded.reduce((sum, row) => sum + row[9 + k], 0));
  const totals = PARTS.map((part, k) => `${part} ${total[k].toFixed(0)} ms`).join(", ");
  const legend = make("p", { class: "key" }, ...PARTS.map((part, k) => make("span", { class: part, text: `${part} ${(total[k] / decoded.length).toFixed(2)} ms` })));
  const marks = [[MARGIN_LEFT + step / 2, "1"], [WIDTH - 14, String(decoded.length)]];
  return make("div", {}, canvas(`Time per step. Total: ${totals}`, WIDTH, HEIGHT, ...axes(top, (x) => x.toFixed(1), marks), ...bars), legend);
}

export function chartWhatIf(estimate, reason) { // rows: gamma, tokens per pass, tokens/s, range of 95 % of the runs
  if (!estimate) return make("p", { class: "quiet", text: reason });
  const { rows, gamma, measured, fits } = estimate;
  const top = 1.1 * Math.max(measured, ...rows.map((row) => row[4]));
  const x = (g) => MARGIN_LEFT + 14 + (g / Math.max(1, rows.at(-1)[0])) * (WIDTH - MARGIN_LEFT - 28);
  const y = (rate) => HEIGHT - MARGIN_BOTTOM - height(rate / top);
  const best = rows.reduce((a, b) => (b[2] > a[2] ? b : a));
  const advised = fits && best[0] !== gamma && best[3] > measured;
  const outline = [...rows.map((row) => [row[0], row[4]]), ...rows.toReversed().map((row) => [row[0], row[3]])];
  const band = svg("polygon", { points: outline.map(([g, rate]) => `${x(g)},${y(rate)}`).join(" "), class: "band" });
  const line = svg("polyline", { points: rows.map(([g, , rate]) => `${x(g)},${y(rate)}`).join(" "), class: "line" });
  const dots = rows.map(([g, passes, rate, low, up]) => {
    const marked = advised && g === best[0];
    return svg("circle", { cx: x(g), cy: y(rate), r: marked ? 5 : 3, class: marked ? "dot best" : "dot" },
      svg("title", { text: `γ ${g}: ${rate.toFixed(1)} tokens/s (${low.toFixed(1)}–${up.toFixed(1)}), ${passes.toFixed(2)} per pass` }));
  });
  const cross = gamma === null ? [] : [svg("path", { d: `M${x(gamma) - 6} ${y(measured)}h12M${x(gamma)} ${y(measured) - 6}v12`, class: "was" }, svg("title", { text: `measured: ${measured.toFixed(1)} tokens/s` }))];
  const verdict = !fits ? "No advice: the estimate misses the measured speed." : advised ? `Estimated best: γ ${best[0]}${best[0] ? "" : " (no drafts)"}, ${best[3].toFixed(0)}–${best[4].toFixed(0)} tokens/s.` : "No other draft length is clearly faster.";
  const summary = `${verdict} Measured${gamma === null ? ":" : ` (+): γ ${gamma},`} ${measured.toFixed(0)} tokens/s.`;
  const table = make("table", { class: "other" }, make("tr", {}, ...["γ", "tokens per pass", "tokens/s", "95 % of runs"].map((text) => make("th", { text, scope: "col" }))),
    ...rows.map(([g, passes, rate, low, up]) => make("tr", {}, ...[g, passes.toFixed(2), rate.toFixed(1), `${low.toFixed(1)}–${up.toFixed(1)}`].map((text) => make("td", { text: String(text) })))));
  const marks = rows.map(([g]) => [x(g), String(g)]);
  return make("div", {}, canvas(summary, WIDTH, HEIGHT, ...axes(top, (v) => v.toFixed(0), marks), band, line, ...dots, ...cross), make("p", { text: summary }), table);
}
