// Drawing of the place that a draft was copied from: an excerpt in the inspector, and highlights in prompt and text.

import { make } from "./elements.js";
import { DISCARDED } from "./state.js";

const HIGHLIGHTS = ["specdemo-copied", "specdemo-context"];

export function drawSource(source) {
  if (!source?.sentence) return [];
  const parts = source.excerpt?.map((text) => visibleBreaks(text));
  const excerpt = parts && make("p", { class: "excerpt" }, `…${parts[0]}`, make("mark", { class: "context", text: parts[1] }), make("mark", { class: "copied", text: parts[2] }), `${parts[3]}…`);
  return [make("p", { text: source.sentence }), ...(excerpt ? [excerpt] : [])];
}

function visibleBreaks(text) { return text.replace(/\n/g, "⏎"); }

export function highlightSource(lane, source) {
  for (const name of HIGHLIGHTS) CSS.highlights?.delete(name);
  if (!source || !CSS.highlights) return;
  const nodes = committedTexts(lane);
  const ranges = (places) => places.map(([start, end]) => rangeOf(nodes, start, end)).filter(Boolean);
  for (const [i, name] of HIGHLIGHTS.entries()) CSS.highlights.set(name, new Highlight(...ranges([source.copied, source.context][i])));
}

function committedTexts(lane) { // text nodes of prompt and committed tokens, with the number of characters before each
  const nodes = [];
  let length = 0;
  for (const part of lane.querySelectorAll(".given, .tok")) {
    if (DISCARDED.has(part.dataset.kind)) continue;
    const walker = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      nodes.push([length, walker.currentNode]);
      length += walker.currentNode.textContent.length;
    }
  }
  return nodes;
}

function rangeOf(nodes, start, end) {
  const at = (offset) => nodes.findLast(([before]) => before <= offset);
  const [first, last] = [at(start), at(end - 1)];
  if (!first || !last || start - first[0] > first[1].length || end - last[0] > last[1].length) return null;
  const range = document.createRange();
  range.setStart(first[1], start - first[0]);
  range.setEnd(last[1], end - last[0]);
  return range;
}
