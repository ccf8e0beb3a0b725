// Elements, SVG shapes and bars of distributions, for every page. Texts are inserted with textContent.

export const SVG = "http://www.w3.org/2000/svg";

export function make(tag, attributes, ...children) { return completed(document.createElement(tag), attributes, children); }

export function svg(tag, attributes, ...children) { return completed(document.createElementNS(SVG, tag), attributes, children); }

function completed(node, attributes = {}, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function setText(node, text) { if (node.textContent !== text) node.textContent = text; }

export function canvas(label, width, height, ...children) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "chart" }, ...children);
}

export function visibleText(text) { return text === "" ? "◌" : text.replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣"); }

export function tokenClass(text) { return /[\p{L}\p{N}]/u.test(text) ? "tok" : "tok symbol"; } // a line would hide a rejected comma or blank

export function formatNumber(x) { return x === null ? "–" : x > 0 && x < 0.001 ? "< 0.001" : x.toFixed(3); }

export function seconds(t) { return `${t.toFixed(t < 1 ? 3 : 2)} s`; }

export function withNoun(number, noun) { return `${number} ${number === 1 ? noun : noun.endsWith("s") ? `${noun}es` : `${noun}s`}`; }

export function bar(share, kind) { return make("span", { class: kind, style: `width: ${100 * Math.min(1, Math.max(0, share ?? 0))}%` }); }

export function barRow(label, share, value) {
  return make("div", { class: "time-row" }, make("span", { class: "time-name", text: label }), make("div", { class: "track" }, bar(share, "p")), make("span", { text: value }));
}

export function drawBars(bars, ...names) { // a row per token: p above q, their minimum shaded
  const rows = bars.map(([text, p, q]) => {
    const track = make("span", { class: "track" }, bar(p, "p"));
    if (names.length > 1) track.append(bar(q, "q"));
    if (names.length > 1 && p !== null && q !== null) track.append(bar(Math.min(p, q), "both"));
    const number = (mass) => (mass === null ? "?" : mass.toFixed(3));
    const masses = names.length > 1 ? `${number(p)} ${number(q)}` : number(p);
    return make("div", { class: "law" }, make("code", { text: visibleText(text) }), track, make("span", { class: "mass", text: masses }));
  });
  const key = (kind) => make("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
  const legend = names.length > 1 ? [key("p"), "p large model ", key("q"), "q helper ", key("both"), "both"] : [key("p"), names[0]];
  return make("div", { class: "laws" }, make("p", { class: "quiet" }, ...legend), ...rows);
}
