// Charts with two axes, and runs as rows of blocks over time. Dash patterns and labels identify curves without colour.

import { canvas, make, svg } from "./elements.js";

const WIDTH = 460, HEIGHT = 240;
const LEFT = 46, TOP = 24, BOTTOM = 38, RIGHT = 8; // least margins
const LETTER = 7.2; // width of a letter of a label
const SAMPLE = 18; // length of the line before a label
const LABEL_LINE = 14; // distance of labels
const BAR = 0.75; // share of the distance of bars
const NAMED_BAR = 16; // least distance of bars with names
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 2"];

function ticks(low, high) { // about five multiples of 1, 2 or 5 times a power of ten
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough * (1 - 1e-9));
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => Number(((first + i) * step).toPrecision(10)));
}

function bounds(values) { // never empty
  const low = Math.min(...values), high = Math.max(...values);
  if (!values.length) return [0, 1];
  return high > low ? [low, high] : [low, low + 1];
}

function stackedSeries(series, names = []) { // lines with dash patterns, and bars with the points [x, bottom, top, tooltip]
  const tops = new Map(), lines = series.filter(({ kind }) => kind === "line");
  const stack = ([x, y, tooltip], label) => {
    const bottom = tops.get(x) ?? 0;
    tops.set(x, bottom + y);
    return [x, bottom, bottom + y, tooltip ?? `${[names[x] ?? x, label].filter(Boolean).join(", ")}: ${y}`];
  };
  return series.map((entry) => {
    if (entry.kind === "bar") return { ...entry, points: entry.points.map((point) => stack(point, entry.label)) };
    return entry.kind === "line" ? { ...entry, dash: DASHES[lines.indexOf(entry) % DASHES.length] } : entry;
  });
}

function scales(series, { names = [], include = [] }) { // sizes, bounds, and functions from values to pixels
  const points = series.flatMap((entry) => entry.points);
  const heights = series.flatMap(({ kind, points: some }) => some.flatMap((point) => (kind === "bar" || kind === "band" ? point.slice(1, 3) : [point[1]])));
  const barred = series.some(({ kind }) => kind === "bar");
  const xs = points.map(([x]) => x), across = barred ? [Math.min(...xs) - 0.5, Math.max(...xs) + 0.5] : bounds(xs);
  const up = bounds([...heights, ...include]);
  const longest = LETTER * Math.max(0, ...names.map((name) => name.length));
  const slanted = longest * names.length > WIDTH - LEFT;
  const width = Math.max(WIDTH, LEFT + NAMED_BAR * names.length), left = LEFT + (slanted ? 0.45 * longest : 0);
  const labels = series.filter(({ kind, label }) => kind !== "bar" && label).map(({ label }) => label.length);
  const right = width - (labels.length ? SAMPLE + 12 + LETTER * Math.max(...labels) : RIGHT);
  const bottom = HEIGHT - BOTTOM, height = HEIGHT + (slanted ? 0.5 * longest : 0);
  const x = (value) => left + ((value - across[0]) / (across[1] - across[0])) * (right - left);
  const y = (value) => bottom - ((value - up[0]) / (up[1] - up[0])) * (bottom - TOP);
  return { width, height, left, right, bottom, across, up, barred, slanted, x, y };
}

function axisText(x, y, place, text) { return svg("text", { x, y, class: `axis ${place}`, text }); }

function nameOfBar(name, x, { bottom, slanted }) {
  const text = axisText(x, bottom + 16, slanted ? "end" : "middle", name);
  if (slanted) text.setAttribute("transform", `rotate(-35 ${x} ${bottom + 12})`);
  return text;
}

function axes(scale, { x: across = "", y: up = "", unit = "", names = [] }) {
  const { left, right, bottom, x, y } = scale;
  const rows = ticks(...scale.up).flatMap((value) => [
    svg("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" }), axisText(left - 5, y(value) + 4, "end", `${value}${unit}`)]);
  const columns = names.length ? names.map((name, i) => nameOfBar(name, x(i), scale)) : ticks(...scale.across).filter((value) => !scale.barred || Number.isInteger(value)).map((value) => axisText(x(value), bottom + 16, "middle", String(value)));
  return [...rows, ...columns, axisText((left + right) / 2, scale.height - 4, "middle", across), axisText(2, 10, "start", up)];
}

function path(points, scale) { return points.map(([x, y]) => `${scale.x(x).toFixed(2)},${scale.y(y).toFixed(2)}`).join("L"); }

const MARKS = { // shapes of a series
  line: ({ points, colour, dash }, scale) => [svg("path", { d: points.length ? `M${path(points, scale)}` : "", class: "line", stroke: colour, "stroke-dasharray": dash })],
  band: ({ points, colour }, scale) => [svg("path", { d: `M${path(points, scale)}L${path(points.toReversed().map(([x, , high]) => [x, high]), scale)}Z`, class: "band", fill: colour })],
  bar: ({ name, points, colour }, scale) => points.map(([x, bottom, top, tooltip]) => {
    const half = (BAR * (scale.x(1) - scale.x(0))) / 2;
    const shape = { x: scale.x(x) - half, width: 2 * half, y: scale.y(top), height: scale.y(bottom) - scale.y(top) };
    return withTooltip(svg("rect", { ...shape, fill: colour, class: `bar ${name ?? ""}` }), tooltip);
  }),
  dot: ({ points, colour, fill = colour, size = 5 }, scale) => points.map(([x, y, tooltip]) => withTooltip(svg("circle", { cx: scale.x(x), cy: scale.y(y), r: size, class: "dot", fill, stroke: colour }), tooltip)),
  cross: ({ points, colour }, scale) => points.map(([x, y, tooltip]) => withTooltip(svg("path", { d: `M${scale.x(x) - 6} ${scale.y(y)}h12M${scale.x(x)} ${scale.y(y) - 6}v12`, class: "was", stroke: colour }), tooltip)),
};

function withTooltip(shape, tooltip) {
  if (tooltip) shape.append(svg("title", { text: tooltip }));
  return shape;
}

function endLabels(series, scale) { // at the ends of the curves, without overlaps
  const ends = series.filter(({ kind, label, points }) => kind !== "bar" && label && points.length);
  const places = ends.map((entry) => ({ entry, end: scale.y(entry.points.at(-1)[1]) })).sort((a, b) => a.end - b.end);
  let y = -Infinity;
  return places.flatMap(({ entry, end }, n) => {
    y = Math.min(Math.max(end, y + LABEL_LINE), scale.bottom - LABEL_LINE * (places.length - 1 - n));
    const left = scale.right + 6;
    const sample = entry.kind === "dot" ? svg("circle", { cx: left + SAMPLE / 2, cy: y, r: 4, fill: entry.colour }) : svg("line", { x1: left, x2: left + SAMPLE, y1: y, y2: y, stroke: entry.colour, "stroke-dasharray": entry.dash ?? "", class: "line" });
    return [sample, svg("text", { x: left + SAMPLE + 5, y: y + 4, class: "label", text: entry.label })];
  });
}

function drawKey(entries) { // of bars and blocks: { label, colour }
  return make("p", { class: "key" }, ...entries.map(({ label, colour }) => make("span", { style: `--of: ${colour}`, text: label })));
}

/**
 * Figure: title or label (its text alternative); x, y: titles of the axes; unit of y; names of the x values 0, 1 ...;
 * include: values of y on the axis; series: { kind: key of MARKS, colour, points: [x, y, tooltip], label, name }.
 */
export function drawChart(figure) {
  const { label, title, series } = figure;
  const all = stackedSeries(series, figure.names), bars = series.filter(({ kind }) => kind === "bar");
  const scale = scales(all, figure);
  const marks = all.flatMap((entry) => MARKS[entry.kind](entry, scale));
  const picture = canvas(label ?? title, scale.width, scale.height, ...axes(scale, figure), svg("g", { class: "marks" }, ...marks), ...endLabels(all, scale));
  return make("div", { class: "plot" }, scrollable(picture, scale.width, title), ...(bars.some((entry) => entry.label) ? [drawKey(bars)] : []));
}

function scrollable(picture, width, title) { // from the width of ordinary charts on
  if (width <= WIDTH) return make("div", { class: "chart-scroll" }, picture);
  picture.style.minWidth = `${width}px`;
  return make("div", { class: "chart-scroll", tabindex: 0, role: "region", "aria-label": title }, picture);
}

const TIME = { width: 960, row: 46, bar: 24, foot: 24, top: 18, mark: 46 }; // pixels; mark: least distance of texts

function drawMarks(marks, x, bottom) { // a line at each mark, and its text unless it would overlap
  let last = -Infinity;
  return marks.flatMap(([t, text]) => {
    const line = svg("line", { x1: x(t), x2: x(t), y1: 4, y2: bottom, class: "grid" });
    if (x(t) - last <= TIME.mark) return [line];
    last = x(t);
    return [line, axisText(last + 2, 12, "start", text)];
  });
}

function placeOf(x) { return x < TIME.mark / 2 ? "start" : x > TIME.width - TIME.mark / 2 ? "end" : "middle"; } // within the axis

function drawTimeline({ label, rows, blocks, key, marks }) {
  const start = Math.min(...blocks.map((block) => block.start)), end = Math.max(...blocks.map((block) => block.start + block.duration));
  const x = (t) => ((t - start) / Math.max(end - start, 1e-6)) * TIME.width;
  const top = marks.length ? TIME.top : 0, height = top + rows.length * TIME.row + TIME.foot, y = (row) => top + row * TIME.row;
  const colours = Object.fromEntries(key.map(({ kind, colour }) => [kind, colour]));
  const names = rows.map((name, row) => svg("text", { x: 0, y: y(row) + 12, class: "label", text: name }));
  const shapes = blocks.map(({ row, kind, start: from, duration, tooltip }) => withTooltip(svg("rect", { x: x(from), y: y(row) + 16, width: Math.max(x(from + duration) - x(from), 0.5), height: TIME.bar, class: `block ${kind}`, fill: colours[kind] }), tooltip));
  const times = ticks(start, end).map((t) => axisText(x(t), height - 6, placeOf(x(t)), `${t} ms`));
  const picture = canvas(label, TIME.width, height, ...drawMarks(marks, x, height - TIME.foot), ...names, ...shapes, ...times);
  picture.style.minWidth = "720px";
  return make("div", { class: "plot" }, make("div", { class: "chart-scroll", role: "region", "aria-label": label, tabindex: 0 }, picture), drawKey(key));
}

const SAVE = ["svg", "png"];

class ChartView extends HTMLElement { // chart in a tab
  static observedAttributes = ["figure"];

  attributeChangedCallback() { queueMicrotask(() => this.draw()); } // Gradio sets the attribute before the content

  connectedCallback() { // it may also empty the content later
    new MutationObserver(() => this.firstChild ?? this.draw()).observe(this, { childList: true });
  }

  draw() {
    const figure = JSON.parse(this.getAttribute("figure"));
    if (figure.blocks) return this.replaceChildren(drawTimeline(figure));
    const buttons = SAVE.map((kind) => make("button", { type: "button", class: "save-chart", "data-save": kind, text: kind.toUpperCase(), "aria-label": `Save as ${kind.toUpperCase()}: ${figure.title}` }));
    this.replaceChildren(make("figure", {}, make("figcaption", { text: figure.title }, ...buttons), drawChart(figure)));
  }
}

if (!customElements.get("chart-view")) customElements.define("chart-view", ChartView);

// A run on the time axis: a block per step. Times begin with the first token; over a link with the prompt.

const AXIS = 1000, BLOCK = 18;
const MOST_LINES = 30; // more would look like a bar code

export function drawBlocks(times, end, label) { // `times`: end of each step in seconds; lines separate the steps
  const x = (t) => ((AXIS * t) / end).toFixed(2);
  const lines = times.length > MOST_LINES ? "" : times.slice(0, -1).map((t) => `M${x(t)} 0V${BLOCK}`).join("");
  const picture = canvas(label, AXIS, BLOCK, svg("rect", { width: x(times.at(-1)), height: BLOCK, class: "run" }), svg("path", { d: lines, class: "ends" }), svg("rect", { y: 0, height: BLOCK, width: 0, class: "linked" }));
  picture.setAttribute("preserveAspectRatio", "none");
  return picture;
}

export function countSteps(times) { return `${times.filter((t) => t > 0).length} steps`; } // without a first pass that is not on the axis

export function markBlock(picture, times, end, i) { // no block for -1
  const mark = picture.querySelector(".linked"), from = times[i - 1] ?? 0;
  mark.setAttribute("x", i < 0 ? 0 : (AXIS * from) / end);
  mark.setAttribute("width", i < 0 ? 0 : Math.max(2, (AXIS * (times[i] - from)) / end));
}
