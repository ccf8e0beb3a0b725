// Lanes of the cockpit: their boxes, headings and tokens. Texts of models and visitors are inserted with textContent.

import { make } from "./elements.js";
import { $, cellOf, DISCARDED, HEADINGS, lanes } from "./state.js";

export function createLanes() {
  for (const [name, heading] of Object.entries(HEADINGS)) {
    const button = (what, text) => make("button", { type: "button", class: "small", id: `${what}-${name}`, disabled: true, text });
    const header = make("header", {},
      make("h2", { text: heading }), make("span", { class: "title" }), make("span", { class: "model quiet" }), make("span", { class: "badge", hidden: true }),
      make("span", { class: "rate" }));
    const footer = make("footer", {}, button("copy", "Copy text"), button("trace", "Save trace"), button("csv", "Save steps (CSV)"), button("svg", "Save picture (SVG)"));
    const lane = make("div", { class: "lane", id: `lane-${name}`, role: "log", "aria-live": "off", tabindex: 0,
      "aria-label": `${heading}: arrow keys move between tokens, Enter shows the step` });
    const box = make("article", { class: "box", "data-lane": name, hidden: name !== "spec" }, header, lane, footer);
    $(".lanes").append(box);
    lanes[name] = { box, lane, steps: [], shown: 0 };
  }
}

export function drawHead(name, head, fragment) {
  const { box } = lanes[name];
  Object.assign(lanes[name], { reasons: head.reasons, fates: head.fates });
  Object.assign($(".title", box), { textContent: head.title, title: head.about });
  $(".model", box).textContent = head.model;
  const badge = $(".badge", box);
  badge.hidden = !head.badge;
  badge.dataset.exact = head.exact;
  badge.textContent = head.badge;
  badge.title = head.why;
  lanes[name].lane.classList.toggle("prose", head.chat);
  fragment.append(head.chat ? conversationSpan(head.prompt) : promptSpan(head.prompt));
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

function conversationSpan(prompt) {
  const parts = [];
  let end = 0;
  for (const match of prompt.matchAll(TEMPLATE)) {
    const message = prompt.slice(end, match.index);
    parts.push(message, ...(/\S *$/.test(message) ? [make("br")] : []), make("span", { class: "template", text: match[0] }));
    end = match.index + match[0].length;
  }
  const given = make("span", { class: "given" });
  const lines = prompt.split("\n").reduce((sum, line) => sum + 1 + Math.floor(line.length / LINE_CHARACTERS), 0);
  given.append(make("span", { class: "earlier", tabindex: lines > PROMPT_LINES ? 0 : null }, make("span", {}, ...parts, prompt.slice(end))));
  return given;
}

export function drawStep(name, record, fragment) {
  const lane = lanes[name];
  const step = make("span", { class: "round" });
  let tokens = 0, accepted = 0, untested = null;
  for (const [k, cell] of record.c.entries()) {
    const [kind, text] = cell;
    const span = document.createElement("span");
    span.className = "tok";
    span.dataset.kind = kind;
    if (DISCARDED.has(kind)) {
      span.textContent = text.replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥");
    } else {
      span.textContent = text;
      if (text.startsWith("\n")) span.dataset.newline = "";
      if (lane.fences % 2 || text.startsWith("```")) span.classList.add("code");
      lane.fences += text.split("```").length - 1;
      tokens += 1;
      accepted += Number(kind === "accepted");
    }
    if (kind === "ignored") (untested ??= span).dataset.more = Number(untested.dataset.more ?? 0) + 1;
    cellOf.set(span, [cell, record.i, lane.reasons[record.w[k]]]);
    step.append(span);
  }
  const undisclosed = record.undisclosed ?? 0; // draft tokens that another engine reports by their number only
  if (undisclosed) {
    const mark = make("span", { class: "undisclosed", text: `+${undisclosed}`, title: `+${undisclosed}, not reported by the engine` });
    step.insertBefore(mark, step.querySelector("[data-kind=correction]"));
  }
  fragment.append(step);
  if (record.by) { step.dataset.by = record.by; $("[data-legend=unseen]").parentElement.hidden = false; }
  if (record.trips) step.dataset.trips = record.trips;
  if (record.fate) resolveProvisional(lane.steps, record.fate);
  const before = lane.steps.at(-1) ?? { tokens: 0, accepted: 0, drafted: 0 };
  const drafted = record.c.filter(([kind]) => kind === "accepted" || DISCARDED.has(kind)).length + undisclosed;
  lane.steps.push({ span: step, t: record.t, tokens: before.tokens + tokens, accepted: before.accepted + accepted, drafted: before.drafted + drafted });
  lane.shown = lane.steps.length;
}

function resolveProvisional(steps, [confirmed, overruled]) { // apply a late response to the oldest provisional steps
  const open = steps.flatMap(({ span }) => (span.dataset.by === "provisional" && !span.dataset.fate ? [span] : []));
  open.forEach((span, i) => { span.dataset.fate = i < confirmed ? "confirmed" : i < confirmed + overruled ? "overruled" : "open"; });
}
