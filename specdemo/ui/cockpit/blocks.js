// A run on the time axis: a block per step. Times begin with the first token; over a link with the prompt.

import { canvas, svg } from "./elements.js";

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

export function seconds(t) { return `${t.toFixed(t < 1 ? 3 : 2)} s`; }

export function markBlock(picture, times, end, i) { // no block for -1
  const mark = picture.querySelector(".linked"), from = times[i - 1] ?? 0;
  mark.setAttribute("x", i < 0 ? 0 : (AXIS * from) / end);
  mark.setAttribute("width", i < 0 ? 0 : Math.max(2, (AXIS * (times[i] - from)) / end));
}
