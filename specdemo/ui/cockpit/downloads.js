// Files that a visitor saves: the text of a lane as a picture, plots, traces, and a run as a web page.

import { make, seconds, setText, SVG, svg } from "./elements.js";
import { asCsv } from "./figures.js";
import { committedText } from "./lanes.js";
import { shownResult } from "./result.js";
import { savedTrace, setStatus } from "./run.js";
import { $, current, DISCARDED, lanes, listeners } from "./state.js";
import { KIND_WORDS, shownTokens } from "./steps.js";

function save(text, name, type) {
  if (text) download(text, name, type);
  else setStatus("failed", text === undefined ? "the request failed: try again" : "the server no longer stores this run: run it again");
}

export function connectDownloads() {
  for (const [name, { lane }] of Object.entries(lanes)) {
    $(`#copy-${name}`).addEventListener("click", async (e) => {
      const result = await (navigator.clipboard?.writeText(committedText(lane)) ?? Promise.reject()).then(() => "Copied", () => "Not permitted");
      setText(e.target, result);
      setTimeout(() => setText(e.target, "Copy text"), 1500);
    });
    $(`#trace-${name}`).addEventListener("click", async () => save(await savedTrace(name), `specdemo-${name}.jsonl`, "application/x-ndjson"));
    $(`#csv-${name}`).addEventListener("click", () => download(asCsv(lanes[name]), `specdemo-${name}.csv`, "text/csv"));
    const picture = () => textPicture(lanes[name], current.frame.figures[name].metrics, current.frame.rates[name], shownResult());
    $(`#svg-${name}`).addEventListener("click", () => download(picture(), `specdemo-${name}.svg`, "image/svg+xml"));
    $(`#png-${name}`).addEventListener("click", () => savePng(picture(), `specdemo-${name}.png`));
  }
  $("#save-all").addEventListener("click", async () => save(await savedTrace("all"), "specdemo.jsonl", "application/x-ndjson"));
  $("#save-page").addEventListener("click", async () => save(await savedPage(), "specdemo.html", "text/html"));
}

// --- plots: a copy with the styles of the page, which needs no style sheet -------------------------------------------

const COPIED_STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "text-anchor", "vector-effect", "stroke-linecap"];
const TEXT_LINE = 22;

function standaloneSvg(pictures, captions, keys = []) { // stacked from top to bottom; `keys`: [colour, text]
  const boxes = pictures.map((picture) => picture.getBoundingClientRect());
  const width = Math.max(...boxes.map((box) => box.width)), gap = 8;
  const file = svg("svg", { xmlns: SVG, width, height: boxes.reduce((sum, box) => sum + box.height + gap, (captions.filter(Boolean).length + keys.length) * TEXT_LINE) });
  file.append(svg("rect", { width: "100%", height: "100%", fill: getComputedStyle($(".cockpit")).getPropertyValue("--paper") }));
  const { color, fontFamily } = getComputedStyle($(".cockpit"));
  const write = (x, top, text) => file.append(svg("text", { x, y: top + 15, fill: color, "font-size": 13, "font-family": fontFamily, text }));
  let y = 0;
  for (const [i, picture] of pictures.entries()) {
    if (captions[i]) { write(4, y, captions[i]); y += TEXT_LINE; }
    const copy = picture.cloneNode(true);
    const copies = [copy, ...copy.querySelectorAll("*")];
    for (const [k, original] of [picture, ...picture.querySelectorAll("*")].entries()) {
      const style = getComputedStyle(original);
      for (const name of COPIED_STYLES) copies[k].style.setProperty(name, style.getPropertyValue(name));
    }
    for (const [name, value] of Object.entries({ x: 0, y, width: boxes[i].width, height: boxes[i].height })) copy.setAttribute(name, value);
    file.append(copy);
    y += boxes[i].height + gap;
  }
  for (const [fill, text] of keys) {
    file.append(svg("rect", { x: 4, y: y + 5, width: 10, height: 10, fill }));
    write(19, y, text);
    y += TEXT_LINE;
  }
  return new XMLSerializer().serializeToString(file);
}

function rowText(row) { return [...(row?.children ?? [])].map((part) => part.textContent).filter(Boolean).join(" "); }

function captionOf(button) { return button.closest("figure")?.querySelector("figcaption").firstChild.textContent.trim() ?? ""; }

function download(text, name, type) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Save the plot named by a button of the cockpit, or the chart around a button of a tab. */
function savePlot(button) {
  const plot = document.getElementById(button.dataset.plot ?? button.closest("chart-view[id], .block").id), pictures = [...plot.querySelectorAll("svg")];
  if (!pictures.length) return;
  const captions = pictures.map((picture) => rowText(picture.closest(".time-row")) || captionOf(button));
  const keys = [...plot.querySelectorAll(".key span")].map((span) => [getComputedStyle(span, "::before").backgroundColor, span.textContent]);
  const text = standaloneSvg(pictures, captions, keys), name = `specdemo-${plot.id}`;
  if (button.dataset.save === "png") savePng(text, `${name}.png`);
  else download(text, `${name}.svg`, "image/svg+xml");
}

export function connectPlotExport() {
  document.addEventListener("click", (e) => {
    const button = /** @type {Element} */ (e.target).closest("[data-plot], [data-save]");
    if (button) savePlot(button);
  }, { signal: listeners.signal });
}

async function savePng(text, name) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
  await image.decode();
  const picture = document.createElement("canvas");
  const scale = 2;
  picture.width = image.width * scale;
  picture.height = image.height * scale;
  picture.getContext("2d").drawImage(image, 0, 0, picture.width, picture.height);
  picture.toBlob((blob) => download(blob, name, "image/png"));
}

// --- a run as a web page that needs no server: the page without a run, which the server offers, and the run ----------

const SETTINGS = ["temperature", "top_k", "top_p", "seed", "max_tokens", "rule", "policy"];
const DIGITS = 6; // significant digits of numbers; the page shows 3 decimals

async function savedPage() { // undefined if the request fails
  const response = await fetch(new URL("saved_page.html", import.meta.url)).catch(() => null);
  if (!response?.ok) return undefined;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const { head, header } = lanes[current.frame.plan.find((name) => lanes[name].head)];
  const heading = [head.title, head.model].filter(Boolean).join(", ");
  page.title = `specdemo: ${heading}`;
  page.querySelector("h1").textContent = `Speculative decoding: ${heading}`;
  page.querySelector(".about").textContent = `Recorded with specdemo: ${settingsOf(header.recipe)}. Click a token to see its step.`;
  page.getElementById("run-data").textContent = await compressed({ ...current.frame, at: 0, r: current.records });
  return `<!doctype html>\n${page.documentElement.outerHTML}\n`;
}

function settingsOf(recipe) {
  const known = SETTINGS.filter((name) => (recipe[name] ?? null) !== null);
  return known.map((name) => `${name.replaceAll("_", " ")} ${recipe[name]}`).join(", ");
}

async function compressed(data) { // gzip in base64
  const shorter = (_, value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(DIGITS)) : value);
  const stream = new Blob([JSON.stringify(data, shorter)]).stream().pipeThrough(new CompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}

// --- the result and the tokens of a lane as SVG, in the light colours ------------------------------------------------

const LINE_COLUMNS = 96, TAB = "    "; // characters of a line, and of a tab
const LINE = 22, CHAR = 8; // pixels of a line and a column
const SIZE = 13, EDGE = 16; // pixels of the font and the margin
const MAX_LINES = 2000;
const LEGEND = ["accepted", "rejected", "ignored", "correction", "bonus"];
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff60\u{1f300}-\u{1faff}\u{20000}-\u{3fffd}]/u; // two columns

const RESULT = 58, ROW = 22; // pixels of the headline and of a time bar
const BAR_X = 150, BAR_WIDTH = 540, BAR_HEIGHT = 14;

function textPicture(lane, { acceptance_rate: acceptance }, speed, result) { // `speed` in words
  const { styles, title } = lane.head;
  const pieces = layout(tokensOf(lane));
  const lines = (pieces.at(-1)?.line ?? 0) + 1;
  const top = EDGE + RESULT + result.rows.length * ROW + EDGE;
  const width = 2 * EDGE + LINE_COLUMNS * CHAR, height = top + EDGE + (lines + 3) * LINE;
  const rate = speed && `, ${speed}`;
  const share = acceptance === null ? "" : `, ${(100 * acceptance).toFixed(0)}% of the guesses accepted`;
  const parts = [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" role="img" viewBox="0 0 ${width} ${height}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="${SIZE}">`,
    `<title>${escaped(title)}${rate}${share}</title>`,
    `<rect width="${width}" height="${height}" fill="#ffffff"/>`,
    `<g font-family="Inter, system-ui, sans-serif" fill="${colour("ink")}">`, ...resultShapes(result), "</g>",
  ];
  const draw = (x, y, columns, kind, text) => parts.push(...drawPiece(x, y, columns * CHAR, kind, styles[kind] ?? styles.plain, text));
  for (const { line, column, columns, kind, text } of pieces) draw(EDGE + column * CHAR, top + line * LINE, columns, kind, text);
  const y = height - EDGE - 2 * LINE;
  let x = EDGE;
  for (const kind of LEGEND) {
    const label = KIND_WORDS[kind];
    draw(x, y, label.length, kind, label);
    x += (label.length + 2) * CHAR;
  }
  parts.push(`<text x="${EDGE}" y="${y + LINE + 15}" fill="${colour("quiet")}">${escaped(title)}${rate}</text>`);
  return [...parts, "</svg>\n"].join("\n");
}

function resultShapes({ factor, words, rows }) {
  const [first, ...others] = words.trim().split(/(?<=\.) /);
  const x = EDGE + (factor ? 30 * factor.length : 0);
  const parts = factor ? [`<text x="${EDGE}" y="${EDGE + 40}" font-size="44" font-weight="700">${factor}</text>`] : [];
  for (const [i, text] of [first, others.join(" ")].entries()) {
    parts.push(`<text x="${x}" y="${EDGE + 18 + 20 * i}" font-size="16" font-weight="600">${escaped(text)}</text>`);
  }
  const longest = Math.max(...rows.map((row) => row.time));
  for (const [i, { label, time, fast }] of rows.entries()) {
    const y = EDGE + RESULT + i * ROW, length = (BAR_WIDTH * time) / longest;
    const write = (at, text) => `<text x="${at}" y="${y + 12}" font-size="13">${escaped(text)}</text>`;
    parts.push(write(EDGE, label), `<rect x="${BAR_X}" y="${y}" width="${length.toFixed(1)}" height="${BAR_HEIGHT}" fill="${colour(fast ? "ink" : "quiet")}"/>`,
      write(BAR_X + length + 8, seconds(time)));
  }
  return parts;
}

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`); } // dark ones are those of the body

function escaped(text) { return text.replace(/[&<>]/g, (character) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[character]); }

function drawPiece(x, y, width, kind, style, text) {
  const name = kind === "unverified" ? "unseen" : kind;
  const ink = kind === "prompt" ? colour("quiet") : colour(`${name}-ink`) || colour("ink");
  const parts = [];
  if (colour(name)) parts.push(`<rect x="${x}" y="${y}" width="${width - 1}" height="${LINE - 3}" rx="3" fill="${colour(name)}"/>`);
  if (!text.trim()) return parts;
  const decoration = (style.decoration && ` text-decoration="${style.decoration}"`) + (style.italic ? ' font-style="italic"' : "");
  const printable = escaped(text.replace(/\p{C}/gu, "\ufffd"));
  parts.push(`<text x="${x}" y="${y + 14}" textLength="${width}" lengthAdjust="spacingAndGlyphs" fill="${ink}"${decoration} xml:space="preserve">${printable}</text>`);
  return parts;
}

function* tokensOf({ header, records }) {
  yield { kind: "prompt", text: header.prompt };
  for (const record of records) {
    const { undisclosed } = record.step;
    for (const { kind, text } of shownTokens(record)) {
      if (undisclosed && kind === "correction") yield { kind: "ignored", text: `+${undisclosed}` };
      yield { kind, text: DISCARDED.has(kind) ? text.replaceAll("\n", "⏎") : text };
    }
  }
}

function layout(tokens) { // pieces of lines
  const pieces = [];
  let line = 0, column = 0;
  for (const { kind, text } of tokens) {
    let piece = null; // of the token, on this line
    for (const character of text.replaceAll("\t", TAB)) {
      const columns = WIDE.test(character) ? 2 : 1, breaks = character === "\n";
      if (breaks || column + columns > LINE_COLUMNS) { line += 1; column = 0; piece = null; }
      if (breaks) continue;
      if (!piece) pieces.push((piece = { line, column, columns: 0, kind, text: "" }));
      piece.text += character;
      piece.columns += columns;
      column += columns;
    }
  }
  return pieces.filter((piece) => piece.line < MAX_LINES);
}
