// Lanes of the cockpit: their boxes, headings and tokens. Texts of models and visitors are inserted with textContent.
// Rejected guesses stand above the token that replaced them, so that the text reads as a sentence. Guesses of a line keep
// clear of each other and of the edges: they move sideways, and shrink if the line has no place for all.

import { promptOf } from "./draft_sources.js";
import { make, tokenClass, visibleText } from "./elements.js";
import { $, DISCARDED, HEADINGS, lanes, listeners, tokenData } from "./state.js";
import { acceptedCount, draftSize, shownTokens } from "./steps.js";

export function createLanes() {
  for (const [name, heading] of Object.entries(HEADINGS)) {
    const button = (what, text) => make("button", { type: "button", class: "small", id: `${what}-${name}`, disabled: true, text });
    const header = make("header", {},
      make("h2", { text: heading }), make("span", { class: "title" }), make("span", { class: "model quiet" }), make("span", { class: "badge", hidden: true }),
      make("span", { class: "rate" }));
    const footer = make("details", { class: "menu" }, make("summary", { text: "Copy or save" }),
      button("copy", "Copy text"), button("trace", "Save trace"), button("csv", "Save steps (CSV)"), button("svg", "Save picture (SVG)"), button("png", "Save picture (PNG)"));
    const lane = make("div", { class: "lane", id: `lane-${name}`, role: "log", "aria-live": "off", tabindex: 0,
      "aria-label": `${heading}: arrow keys move between tokens, Enter shows the step` });
    const box = make("article", { class: "box", "data-lane": name, hidden: name !== "spec" }, header, lane, footer);
    $(".lanes").append(box);
    lanes[name] = { box, lane, records: [], steps: [], shown: 0 };
  }
  const resized = new ResizeObserver(placeAllGuesses); // a line breaks elsewhere in another width or font
  for (const { lane } of Object.values(lanes)) resized.observe(lane);
  document.fonts.addEventListener("loadingdone", placeAllGuesses, { signal: listeners.signal });
}

export function addRecords(records) {
  for (const record of records) {
    const lane = lanes[record.l];
    if (record.head) Object.assign(lane, { head: record.head, header: record.header });
    else if (record.step) lane.records.push(record);
  }
}

export function drawHead(name, { head, header }, fragment) {
  const { box } = lanes[name];
  Object.assign($(".title", box), { textContent: head.title, title: head.about });
  $(".model", box).textContent = `${head.model}, temperature ${header.recipe.temperature}`;
  const badge = $(".badge", box);
  badge.hidden = !head.badge;
  badge.dataset.exact = head.exact;
  badge.textContent = head.badge;
  badge.title = head.why;
  lanes[name].lane.classList.toggle("prose", head.chat);
  const prompt = promptOf(header);
  fragment.append(head.chat ? conversationSpan(prompt) : promptSpan(prompt));
}

const PROMPT_LINES = 2; // of a longer prompt only the end is visible at first
const LINE_CHARACTERS = 60;
// Markup of common chat templates, with the system message: hidden by style, since exports contain the complete prompt.
const TEMPLATE = /<\|im_start\|>system\n[^]*?<\|im_end\|>\n?|<\|[^|<>]*\|>(?:(?:system|user|assistant)\b\n?)?\n*|<(?:start|end)_of_turn>(?:user\n|model\n)?\n?|<\/?(?:user|assistant|system)>/g;

function promptSpan(prompt) {
  const given = make("span", { class: "given", text: prompt });
  if (prompt.split("\n").length <= PROMPT_LINES) return given;
  const cut = prompt.lastIndexOf("\n", prompt.length - 2) + 1; // the last line is continued by the text
  given.replaceChildren(make("span", { class: "earlier", text: prompt.slice(0, cut), tabindex: 0 }), prompt.slice(cut));
  return given;
}

function conversationSpan(prompt) { // earlier messages are part of the conversation below: only the last one is visible
  const marks = [...prompt.matchAll(TEMPLATE)];
  const starts = [0, ...marks.map((mark) => mark.index + mark[0].length)], ends = [...marks.map((mark) => mark.index), prompt.length];
  const last = Math.max(0, starts.findLastIndex((start, i) => prompt.slice(start, ends[i]).trim()));
  const hidden = (...range) => make("span", { class: "template", text: prompt.slice(...range) });
  const question = prompt.slice(starts[last], ends[last]);
  const given = make("span", { class: "given" });
  const lines = question.split("\n").reduce((sum, line) => sum + 1 + Math.floor(line.length / LINE_CHARACTERS), 0);
  given.append(make("span", { class: "earlier", tabindex: lines > PROMPT_LINES ? 0 : null }, make("span", {}, hidden(0, starts[last]), question, hidden(ends[last]))));
  return given;
}

export function drawStep(name, record, fragment) {
  const lane = lanes[name], { step, by } = record;
  const round = make("span", { class: "round" });
  let discarded = null; // the first, which shows the number of untested guesses
  for (const token of shownTokens(record)) {
    const { kind, text } = token;
    const span = document.createElement("span");
    span.className = tokenClass(text);
    span.dataset.kind = kind;
    if (DISCARDED.has(kind)) {
      span.textContent = text.trim() ? text.replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥") : visibleText(text);
    } else {
      span.textContent = text;
      if (text.startsWith("\n")) span.dataset.newline = "";
      if (lane.fences % 2 || text.startsWith("```")) span.classList.add("code");
      lane.fences += text.split("```").length - 1;
    }
    if (DISCARDED.has(kind)) discarded ??= span;
    if (kind === "ignored") discarded.dataset.more = String(Number(discarded.dataset.more ?? 0) + 1);
    if (kind === "rejected") lane.guesses.push(span);
    tokenData.set(span, { token, record });
    round.append(span);
  }
  if (step.undisclosed) { // draft tokens that another engine reports by their number only
    const mark = make("span", { class: "undisclosed", text: `+${step.undisclosed}`, title: `+${step.undisclosed}, not reported by the engine` });
    round.insertBefore(mark, round.querySelector("[data-kind=correction]"));
  }
  fragment.append(round);
  if (by) { round.dataset.by = by; $("[data-legend=unseen]").parentElement.hidden = false; }
  if (step.remote?.confirmed !== undefined) resolveProvisional(lane.steps, step.remote);
  const before = lane.steps.at(-1) ?? { tokens: 0, accepted: 0, drafted: 0 };
  lane.steps.push({
    span: round,
    t: record.at,
    tokens: before.tokens + step.tokens.length,
    accepted: before.accepted + acceptedCount(record),
    drafted: before.drafted + (by ? 0 : draftSize(step)),
  });
  lane.shown = lane.steps.length;
}

function resolveProvisional(steps, { confirmed, overruled = 0 }) { // apply a late response to the oldest provisional steps
  const open = steps.flatMap(({ span }) => (span.dataset.by === "provisional" && !span.dataset.fate ? [span] : []));
  open.forEach((span, i) => { span.dataset.fate = i < confirmed ? "confirmed" : i < confirmed + overruled ? "overruled" : "open"; });
}

export function committedText(part) { // of a lane or a step
  return [...part.querySelectorAll(".given, .tok")].filter((span) => !DISCARDED.has(span.dataset.kind)).map((span) => span.textContent).join("");
}

export function scrollLane(lane, span) { // scroll the lane without scrolling the page
  if (!span) { lane.scrollTop = 0; return; }
  const [box, target] = [lane.getBoundingClientRect(), span.getBoundingClientRect()];
  if (target.bottom > box.bottom) lane.scrollTop += target.bottom - box.bottom + 8;
  else if (target.top < box.top) lane.scrollTop += target.top - box.top - 8;
}

// --- places of the guesses -------------------------------------------------------------------------------------------

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
