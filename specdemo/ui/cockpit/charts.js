// Small charts in SVG. Each says in words what it shows; colours are those of the page.

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function canvas(label, width, height, ...children) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "chart" }, ...children);
}

const WIDE = 420, HIGH = 190, LEFT = 38, FOOT = 26, TOP = 10; // of every chart

function frame(top, unit, marks) { // axes: `top` is the largest value, marks are [x, text] under the chart
  const lines = [];
  for (const share of [0, 0.5, 1]) {
    const y = HIGH - FOOT - share * (HIGH - FOOT - TOP);
    lines.push(svg("line", { x1: LEFT, x2: WIDE, y1: y, y2: y, class: "grid" }));
    lines.push(svg("text", { x: LEFT - 5, y: y + 4, class: "axis end", text: unit(share * top) }));
  }
  for (const [x, text] of marks) lines.push(svg("text", { x, y: HIGH - 8, class: "axis middle", text }));
  return lines;
}

const height = (share) => share * (HIGH - FOOT - TOP);

function chartPositions(positions) {
  if (!positions.length) return make("p", { class: "quiet", text: "Nothing was tested." });
  const step = (WIDE - LEFT) / positions.length;
  const bars = positions.map(([share, tested], i) => {
    const bar = svg("rect", { x: LEFT + i * step + 0.15 * step, y: HIGH - FOOT - height(share), width: 0.7 * step, height: height(share), class: "accepted" });
    bar.append(svg("title", { text: `position ${i + 1}: ${(100 * share).toFixed(0)} % of ${tested} tested` }));
    return bar;
  });
  const words = positions.map(([share], i) => `${i + 1}: ${(100 * share).toFixed(0)} %`).join(", ");
  const marks = positions.map((_, i) => [LEFT + (i + 0.5) * step, String(i + 1)]);
  return canvas(`Share of tested tokens that were accepted, by position in the draft: ${words}`, WIDE, HIGH, ...frame(1, (x) => `${(100 * x).toFixed(0)} %`, marks), ...bars);
}

const PARTS = ["draft", "verify", "host"];
const MOST_BARS = 120;

function chartTimes(rows) { // rows of the table; where there are too many, neighbours share a bar
  const after = rows.filter((row) => row[0] > 0);
  if (!after.length) return make("p", { class: "quiet", text: "There was no round after the prefill." });
  const each = Math.ceil(after.length / MOST_BARS);
  const groups = [];
  for (let i = 0; i < after.length; i += each) groups.push(after.slice(i, i + each));
  const means = groups.map((group) => PARTS.map((_, k) => group.reduce((sum, row) => sum + row[9 + k], 0) / group.length));
  const top = Math.max(...means.map((m) => m[0] + m[1] + m[2]));
  const step = (WIDE - LEFT) / groups.length;
  const bars = means.flatMap((mean, i) => {
    let base = 0;
    return mean.map((ms, k) => {
      const bar = svg("rect", { x: LEFT + i * step, y: HIGH - FOOT - height((base + ms) / top), width: Math.max(step - 0.5, 0.5), height: height(ms / top), class: PARTS[k] });
      bar.append(svg("title", { text: `round ${groups[i][0][0]}: ${PARTS[k]} ${ms.toFixed(2)} ms` }));
      base += ms;
      return bar;
    });
  });
  const total = PARTS.map((_, k) => after.reduce((sum, row) => sum + row[9 + k], 0));
  const words = PARTS.map((part, k) => `${part} ${total[k].toFixed(0)} ms`).join(", ");
  const key = make("p", { class: "key" }, ...PARTS.map((part, k) => make("span", { class: part, text: `${part} ${(total[k] / after.length).toFixed(2)} ms` })));
  const marks = [[LEFT + step / 2, "1"], [WIDE - 14, String(after.length)]];
  return make("div", {}, canvas(`Time of each round. In total: ${words}`, WIDE, HIGH, ...frame(top, (x) => x.toFixed(1), marks), ...bars), key);
}

function chartWhatIf(found, whyNot) {
  if (!found) return make("p", { class: "quiet", text: whyNot });
  const { rows, gamma, measured } = found;
  const top = 1.1 * Math.max(measured, ...rows.map((row) => row[2]));
  const x = (g) => LEFT + 14 + (g / Math.max(1, rows.at(-1)[0])) * (WIDE - LEFT - 28);
  const y = (rate) => HIGH - FOOT - height(rate / top);
  const best = rows.reduce((a, b) => (b[2] > a[2] ? b : a));
  const line = svg("polyline", { points: rows.map(([g, , rate]) => `${x(g)},${y(rate)}`).join(" "), class: "line" });
  const dots = rows.map(([g, passes, rate]) => {
    const dot = svg("circle", { cx: x(g), cy: y(rate), r: g === best[0] ? 5 : 3, class: g === best[0] ? "dot best" : "dot" });
    dot.append(svg("title", { text: `γ ${g}: ${rate.toFixed(1)} tokens/s, ${passes.toFixed(2)} per pass` }));
    return dot;
  });
  const was = gamma === null || gamma > rows.at(-1)[0] ? [] : [svg("path", { d: `M${x(gamma) - 6} ${y(measured)}h12M${x(gamma)} ${y(measured) - 6}v12`, class: "was" }, svg("title", { text: `measured: ${measured.toFixed(1)} tokens/s` }))];
  const words = `γ ${best[0]} would have been fastest: about ${best[2].toFixed(0)} tokens/s. Measured${gamma === null ? "" : ` with γ ${gamma}`} (+): ${measured.toFixed(0)}.`;
  const list = make("table", { class: "other" }, make("tr", {}, ...["γ", "tokens per pass", "tokens/s"].map((text) => make("th", { text, scope: "col" }))),
    ...rows.map(([g, passes, rate]) => make("tr", {}, ...[g, passes.toFixed(2), rate.toFixed(1)].map((text) => make("td", { text: String(text) })))));
  const marks = rows.map(([g]) => [x(g), String(g)]);
  return make("div", {}, canvas(words, WIDE, HIGH, ...frame(top, (v) => v.toFixed(0), marks), line, ...dots, ...was), make("p", { text: words }), list);
}
