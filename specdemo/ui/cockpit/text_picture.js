// SVG file of the result and the tokens of a lane, in the light colours.

import { seconds } from "./blocks.js";
import { DISCARDED } from "./state.js";
import { KIND_WORDS, shownTokens } from "./steps.js";

const LINE_COLUMNS = 96, TAB = "    "; // characters of a line, and of a tab
const LINE = 22, CHAR = 8; // pixels of a line and a column
const SIZE = 13, EDGE = 16; // pixels of the font and the margin
const MAX_LINES = 2000;
const LEGEND = ["accepted", "rejected", "ignored", "correction", "bonus"];
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff60\u{1f300}-\u{1faff}\u{20000}-\u{3fffd}]/u; // two columns

const RESULT = 58, ROW = 22; // pixels of the headline and of a time bar
const BAR_X = 150, BAR_WIDTH = 540, BAR_HEIGHT = 14;

export function textPicture(lane, { acceptance_rate: acceptance }, speed, result) { // `speed` in words
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
