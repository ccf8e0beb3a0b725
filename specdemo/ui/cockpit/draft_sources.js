// Origin of the guesses of a step: a sentence, and the places in prompt and text that n-grams and lookups copied from, as
// an excerpt and as highlights.

import { make, withNoun } from "./elements.js";
import { DISCARDED } from "./state.js";

const WORDS = new Map(Object.entries({
  model: "Guessed by a smaller model.",
  head: "Guessed by a small add-on that reads the large model’s inner state.",
  filler: "The large model’s second-best word after the same phrase.",
  random: "A random token: the phrase is new.",
  store: "Copied from an earlier run.",
  pool: "Taken from the phrases that lookahead collected.",
  window: "Taken from the window that lookahead refines.",
}));
const EXCERPT = 40; // characters shown around a copied place

export function describeOrigin({ source = "", order, count: seen, matched }) { // for the card of the token
  const facts = [order && `order ${order}`, seen && `seen ${seen}×`, matched && `match of ${matched} tokens`];
  return source && [source, ...facts.filter(Boolean)].join(", ");
}

export function describeSource(lane, i, names) { // ranges are [start, end] in characters of prompt and text
  const { step } = lane.records[i], [first] = step.origin ?? [];
  if (!first) return null;
  const words = WORDS.get(first.source) ?? "";
  if (words && first.source !== "filler") return { sentence: words, copied: [], context: [], excerpt: null };
  const before = textBefore(lane, i, names);
  const runs = isChain(step) ? adjacentRuns(copiedPositions(before, step)) : [];
  const copied = runs.map(({ node, start, length }) => spanOf(before, start, step.draft.slice(node, node + length)));
  const context = contextOf(before, first, runs[0]);
  return {
    sentence: sentence(before, first, runs[0], lane.header.recipe.ngram ?? 0),
    copied: copied.filter(Boolean),
    context: context.filter(Boolean),
    excerpt: copied[0] ? excerptOf(before.text, copied[0], context[0]) : null,
  };
}

export function isChain({ parents }) { return parents.every((parent, n) => parent === n - 1); }

export function promptOf({ prompt, encoder }) { return encoder ? `${prompt}\n\n` : prompt; } // as displayed

function textBefore({ header, records }, i, names) { // tokens that drafters copy from; an encoder's prompt is a separate text
  const steps = records.slice(0, i).map(({ step }) => step);
  const prompt = header.encoder ? [] : header.prompt_tokens, given = promptOf(header);
  const starts = [given.length]; // of each piece, and the end of the last
  for (const piece of steps.flatMap(({ pieces }) => pieces)) starts.push(starts.at(-1) + piece.length);
  return {
    given,
    prompt,
    starts,
    tokens: [...prompt, ...steps.flatMap(({ tokens }) => tokens)],
    text: given + steps.map(({ text }) => text).join(""),
    names,
  };
}

function copiedPositions({ tokens }, { draft, parents, origin }) { // the latest if a drafter recorded only the order
  return origin.map(({ source, position, order }, n) => {
    if (source === "text" && position < tokens.length) return position;
    if (source !== "n-gram" || !order || order > tokens.length) return null;
    const path = [];
    for (let node = n; node >= 0; node = parents[node]) path.unshift(draft[node]);
    return latest(tokens, [...tokens.slice(-order), ...path].slice(-order));
  });
}

function latest(tokens, ngram) { // position of the last token of the latest occurrence
  for (let end = tokens.length - 1; end >= ngram.length - 1; end--) {
    if (ngram.every((token, k) => tokens[end - ngram.length + 1 + k] === token)) return end;
  }
  return null;
}

function adjacentRuns(positions) { // draft tokens from `node` on that were copied from adjacent positions
  const runs = [];
  for (const [node, start] of positions.entries()) {
    const run = runs.at(-1);
    if (start === null) continue;
    if (run && node === run.node + run.length && start === run.start + run.length) run.length += 1;
    else runs.push({ node, start, length: 1 });
  }
  return runs;
}

function contextOf(before, { order, matched }, run) { // before the copied place and at the end of the text
  const size = order ? order - 1 : (matched ?? 0);
  if (!run || run.node || !size || run.start < size) return [];
  const tokens = before.tokens.slice(run.start - size, run.start);
  return [run.start - size, before.tokens.length - size].map((start) => spanOf(before, start, tokens));
}

function spanOf(before, first, tokens) { // characters of `tokens`, which begin at token `first`; null if unknown
  const { prompt, starts } = before, i = first - prompt.length;
  if (i >= 0) return [i, i + tokens.length].map((k) => starts[Math.min(k, starts.length - 1)]);
  if (i + tokens.length > 0) {
    const [head, tail] = [spanOf(before, first, tokens.slice(0, -i)), spanOf(before, prompt.length, tokens.slice(-i))];
    return head && tail && [head[0], tail[1]];
  }
  return placeInPrompt(before, first, tokens);
}

function placeInPrompt({ given, prompt, names }, first, tokens) { // by the rank among equal texts: traces have no offsets
  const texts = tokens.map((token) => names.get(token));
  if (texts.some((text) => !text || text.includes("\ufffd"))) return null;
  const text = texts.join(""), places = [], equal = [];
  for (let place = given.indexOf(text); place >= 0; place = given.indexOf(text, place + 1)) places.push(place);
  for (const start of prompt.keys()) if (tokens.every((token, k) => prompt[start + k] === token)) equal.push(start);
  const start = places[equal.indexOf(first)];
  return places.length === equal.length && start !== undefined ? [start, start + text.length] : null;
}

function sentence({ prompt }, { source, order, count, matched }, run, highest) {
  if (!run || run.node) return source === "n-gram" ? "Found in an earlier run." : (WORDS.get(source) ?? "");
  const place = run.start < prompt.length ? "prompt" : "text";
  if (!matched && !order) return `Copied from the ${place}.`;
  if (matched) return `Copied from the ${place}: the last ${withNoun(matched, "token")} occurred there.`;
  const backoff = order < highest ? `, after backoff from order ${highest}` : "";
  const times = count === undefined ? "" : ` It occurred ${withNoun(count, "time")}.`;
  return `Copied from the ${place}: the last ${withNoun(order - 1, "token")} occurred there (order ${order}${backoff}).${times}`;
}

function excerptOf(text, [start, end], context) { // before the context, the context, the copied text, after it
  const middle = context?.[1] === start ? context[0] : start;
  const places = [Math.max(0, middle - EXCERPT), middle, start, end, end + EXCERPT];
  return places.slice(1).map((to, k) => text.slice(places[k], to));
}

// --- drawing ---------------------------------------------------------------------------------------------------------

const HIGHLIGHTS = ["specdemo-copied", "specdemo-context"];

export function drawSource(source) {
  if (!source?.sentence) return [];
  const parts = source.excerpt?.map((text) => text.replace(/\n/g, "⏎"));
  const excerpt = parts && make("p", { class: "excerpt" }, `…${parts[0]}`, make("mark", { class: "context", text: parts[1] }), make("mark", { class: "copied", text: parts[2] }), `${parts[3]}…`);
  return [make("p", { text: source.sentence }), ...(excerpt ? [excerpt] : [])];
}

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
