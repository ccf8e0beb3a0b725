// Rejected guesses stand above the token that replaced them, so that the text reads as a sentence. Guesses of a line
// keep clear of each other and of the edges: they move sideways, and shrink if the line has no place for all.

import { DISCARDED, lanes, listeners } from "./state.js";

const DISTANCE = 4; // pixels between guesses

/** Place the guesses of a lane; by default only those from the last line on, which new steps may change. */
export function placeGuesses(lane, all = false) {
  const start = all ? 0 : lane.lastLine;
  const lines = linesOf(lane, start);
  lane.lastLine = start + lines.slice(0, -1).flat().length;
  const { paddingLeft, paddingRight } = getComputedStyle(lane.lane);
  const left = parseFloat(paddingLeft), right = lane.lane.clientWidth - parseFloat(paddingRight);
  for (const line of lines) placeLine(line, left, right);
}

function linesOf(lane, start) { // guesses with the place of the text below them
  const frame = lane.lane.getBoundingClientRect();
  const lines = [];
  let bottom = -Infinity;
  for (const span of lane.guesses.slice(start)) {
    const text = rectBelow(span) ?? frame;
    if (text.top >= bottom) lines.push([]);
    bottom = text.bottom;
    lines.at(-1).push({ span, left: text.left - frame.left, top: text.top - frame.top + lane.lane.scrollTop, width: span.offsetWidth });
  }
  return lines;
}

function rectBelow(span) { // of the token that replaced the guess
  let next = span.nextElementSibling;
  while (next && DISCARDED.has(next.dataset.kind)) next = next.nextElementSibling;
  const rects = [...(next ?? span.parentElement).getClientRects()];
  return rects.sort((a, b) => b.width - a.width)[0]; // the blank before a token may end the line above
}

function placeLine(line, left, right) {
  const needed = line.reduce((sum, { width }) => sum + width + DISTANCE, -DISTANCE);
  const scale = Math.min(1, (right - left) / needed);
  const widths = line.map(({ width }) => scale * width), distance = scale * DISTANCE;
  const at = [];
  for (const [i, guess] of line.entries()) at.push(Math.max(left, guess.left, i ? at[i - 1] + widths[i - 1] + distance : left));
  for (let i = line.length - 1, limit = right; i >= 0; i--) {
    at[i] = Math.min(at[i], limit - widths[i]);
    limit = at[i] - distance;
  }
  for (const [i, { span, top }] of line.entries()) span.style.setProperty("--place", `translate(${at[i]}px, calc(${top}px - 78%)) scale(${scale})`);
}

export function placeAllGuesses() { for (const lane of Object.values(lanes)) if (lane.guesses) placeGuesses(lane, true); }

export function connectGuesses() { // a line breaks elsewhere in another width or font
  const resized = new ResizeObserver(placeAllGuesses);
  for (const { lane } of Object.values(lanes)) resized.observe(lane);
  document.fonts.addEventListener("loadingdone", placeAllGuesses, { signal: listeners.signal });
}
