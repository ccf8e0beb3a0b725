// State and lanes of the run. A frame is a JSON string with the records from index `at` on and the current state.
// Texts of models and visitors are inserted with textContent, never as markup.
window.specdemoListeners?.abort(); // gradio may mount this component again
const listeners = (window.specdemoListeners = new AbortController());
const $ = (selector, within = element) => within.querySelector(selector);
const DISCARDED = new Set(["rejected", "ignored"]);
const FRAME_TIMEOUT_MS = 2500; // without a frame for this long, request missed records
const HEADINGS = { spec: "Speculative", ar: "Autoregressive", third: "Third lane", fourth: "Fourth lane" };

let run = null; // id of the displayed run
let busy = false; // from Run until the last frame
let received = 0; // number of records
let pending = []; // records not drawn yet
let state = null; // latest frame
let drawing = false;
let catchingUp = false;
let stopRequested = false;
let startedAt = 0;
let lastFrameAt = 0;
const earlierRuns = new Set(); // ids of earlier runs, whose last frames may still arrive
const cellOf = new WeakMap(); // token span -> [cell, step index, template of its explanation]
const lanes = {}; // name -> { box, lane, steps: [{ span, t, tokens }], shown }; `tokens` are committed up to that step

// --- layout --------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

for (const [name, heading] of Object.entries(HEADINGS)) {
  const button = (what, text) => make("button", { type: "button", class: "small", id: `${what}-${name}`, disabled: true, text });
  const header = make("header", {},
    make("h2", { text: heading }), make("span", { class: "title" }), make("span", { class: "badge", hidden: true }),
    make("span", { class: "rate" }));
  const footer = make("footer", {}, button("copy", "Copy text"), button("trace", "Save trace"), button("csv", "Save steps (CSV)"), button("svg", "Save picture (SVG)"));
  const lane = make("div", { class: "lane", id: `lane-${name}`, role: "log", "aria-live": "off", tabindex: 0,
    "aria-label": `${heading}: arrow keys move between tokens, Enter shows the step` });
  const box = make("article", { class: "box", "data-lane": name, hidden: name !== "spec" }, header, lane, footer);
  $(".lanes").append(box);
  lanes[name] = { box, lane, steps: [], shown: 0 };
}

// --- receiving -------------------------------------------------------------------------------------------------

function receiveFrame(frame) {
  if (!frame || earlierRuns.has(frame.run) || (state?.over && state.run === frame.run)) return;
  if (frame.run !== run) {
    reset(frame.run, frame.plan);
    if (busy) openSocket(run);
  }
  lastFrameAt = performance.now();
  disconnectedAt = null;
  if (stopRequested) { stopRequested = false; server.stop_run(run); }
  if (frame.at > received) return catchUp();
  const records = frame.r.slice(received - frame.at);
  received += records.length;
  pending.push(...records);
  updateSpeeds(records);
  state = frame;
  if (!drawing) schedule();
}

async function catchUp() {
  if (catchingUp || run === null) return;
  catchingUp = true;
  try {
    const missed = await server.trace_since([run, received]);
    if (missed) receiveFrame(JSON.parse(missed));
    else if (busy) endRun("failed", "failed: the server no longer stores this run");
  } catch {
    reconnect();
  } finally {
    catchingUp = false;
  }
}

function reset(id, plan) {
  if (run !== null) earlierRuns.add(run);
  run = element.dataset.run = id;
  received = firstStepAt = 0;
  pending = [];
  for (const [name, lane] of Object.entries(lanes)) {
    lane.box.hidden = !plan.includes(name);
    lane.lane.replaceChildren();
    $(".title", lane.box).textContent = $(".rate", lane.box).textContent = "";
    $(".badge", lane.box).hidden = true;
    for (const button of lane.box.querySelectorAll("button")) button.disabled = true;
    lane.steps = [];
    lane.shown = 0;
    resetPace(lane);
  }
  $(".lanes").dataset.count = plan.length;
  $(".outcome").hidden = $("#recorded-settings").hidden = true;
  $("#save-all").disabled = true;
  hideTooltip();
  closeReplay();
  closeInspector();
}

// --- drawing ---------------------------------------------------------------------------------------------------

function draw() {
  if (!drawing) return;
  drawing = false;
  if (state.run !== run) return; // replaced by Run
  const byLane = {};
  const following = []; // lanes scrolled to their end
  for (const record of removeDueRecords()) (byLane[record.l] ??= []).push(record);
  for (const [name, records] of Object.entries(byLane)) {
    const { lane } = lanes[name];
    if (lane.scrollHeight - lane.scrollTop - lane.clientHeight < 40) following.push(lane);
    const fragment = document.createDocumentFragment();
    for (const record of records) record.head ? drawHead(name, record.head, fragment) : record.note ? drawNote(record.note, fragment) : drawStep(name, record, fragment);
    if (lane.lastElementChild?.className === "ahead") lane.lastElementChild.remove();
    lane.append(fragment);
    drawContinuation(lane, records.at(-1).ahead);
  }
  const ended = state.over && !pending.length;
  if (!ended && (busy || playback) && element.dataset.stopping !== "yes") showPaceStatus();
  if (ended || performance.now() - tilesDrawnAt >= TILES_INTERVAL_MS) drawTiles();
  for (const lane of following) lane.scrollTop = lane.scrollHeight; // last, so the page is laid out once
  if (ended) showResult();
  else if (pending.length && !drawing) schedule();
}

function drawHead(name, head, fragment) {
  const { box } = lanes[name];
  Object.assign(lanes[name], { reasons: head.reasons, fates: head.fates });
  $(".title", box).textContent = head.title;
  const badge = $(".badge", box);
  badge.hidden = false;
  badge.dataset.exact = head.exact;
  badge.textContent = head.badge;
  badge.title = head.why;
  fragment.append(promptSpan(head.prompt));
}

const PROMPT_LINES = 6; // of a longer prompt only the end is visible at first

function promptSpan(prompt) {
  const given = make("span", { class: "given", text: prompt });
  if (prompt.split("\n").length <= PROMPT_LINES) return given;
  const cut = prompt.lastIndexOf("\n", prompt.length - 2) + 1; // the last line is continued by the text
  given.replaceChildren(make("span", { class: "earlier", text: prompt.slice(0, cut), tabindex: 0 }), prompt.slice(cut));
  return given;
}

function drawStep(name, record, fragment) {
  const step = make("span", { class: "round" });
  let tokens = 0;
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
      tokens += 1;
    }
    cellOf.set(span, [cell, record.i, lanes[name].reasons[record.w[k]]]);
    step.append(span);
  }
  fragment.append(step);
  const lane = lanes[name];
  if (record.by) { step.dataset.by = record.by; $("[data-legend=unseen]").hidden = false; }
  if (record.trips) step.dataset.trips = record.trips;
  if (record.fate) resolveProvisional(lane.steps, record.fate);
  lane.steps.push({ span: step, t: record.t, tokens: (lane.steps.at(-1)?.tokens ?? 0) + tokens });
  lane.shown = lane.steps.length;
}

function drawNote(text, fragment) { fragment.append(make("span", { class: "note", role: "note", text })); }

function resolveProvisional(steps, [confirmed, overruled]) { // apply a late response to the oldest provisional steps
  const open = steps.flatMap(({ span }) => (span.dataset.by === "provisional" && !span.dataset.fate ? [span] : []));
  open.forEach((span, i) => { span.dataset.fate = i < confirmed ? "confirmed" : i < confirmed + overruled ? "overruled" : "open"; });
}

function drawContinuation(lane, text) { // current continuation of a beam search, which the next step may replace
  if (text) lane.append(make("span", { class: "ahead", text }));
}

// --- status --------------------------------------------------------------------------------

function setText(node, text) { if (node.textContent !== text) node.textContent = text; }

function setStatus(phase, text) {
  const root = $(".cockpit");
  if (root.dataset.phase !== phase) root.dataset.phase = phase;
  setText($("#status"), text ? `${phase}: ${text}` : phase);
}

function showClock() { if (busy) setText($(".clock"), `${(((complete() ? lastFrameAt : performance.now()) - startedAt) / 1000).toFixed(1)} s`); }

function tick() {
  if (!busy) return;
  if (performance.now() - tilesDrawnAt > 1.5 * TILES_INTERVAL_MS) { tilesDrawnAt = performance.now(); showClock(); }
  if (run !== null && !complete() && performance.now() - lastFrameAt > FRAME_TIMEOUT_MS) { lastFrameAt = performance.now(); catchUp(); }
}

function startRun() {
  busy = true;
  stopRequested = interrupted = playback = skipPacing = false;
  pending = [];
  startedAt = lastFrameAt = performance.now();
  if (run !== null) earlierRuns.add(run);
  run = null;
  element.dataset.stopping = "no";
  markButtons();
  setStatus("queued", "");
  showClock();
}

function showResult() {
  for (const name of state.plan) {
    const { box, lane } = lanes[name];
    for (const button of box.querySelectorAll("button")) button.disabled = !lane.childElementCount;
  }
  setText($("#verdict"), state.verdict);
  const same = $("#sameness");
  same.hidden = !state.same;
  if (state.same) {
    same.textContent = state.same.badge;
    same.dataset.tone = state.same.tone;
    setText($("#verdict"), [state.verdict, state.same.why].filter(Boolean).join(" "));
  }
  $(".outcome").hidden = !$("#verdict").textContent;
  setText($("#race-lengths"), state.lengths);
  if (state.recorded) showRecorded(state.recorded);
  const drawn = state.plan.filter((name) => lanes[name].steps.length);
  $("#save-all").disabled = !drawn.length;
  if (drawn.length) { openReplay(drawn); openInspector(drawn); }
  endRun(state.phase[0], state.phase.filter(Boolean).join(": "));
}

function showRecorded({ prompt, ...settings }) {
  const names = ["target", "drafter", "method", "gamma", "temperature", "top_p", "seed", "max_tokens", "mode"];
  if (!settings.target) names.unshift("pair");
  const words = names.filter((name) => settings[name] || settings[name] === 0).map((name) => `${name.replace("_", " ")} ${settings[name]}`);
  const end = prompt.length > 80 ? `…${prompt.slice(-80)}` : prompt; // chat templates begin with instructions
  setText($("#recorded-settings span"), `Recorded with the prompt ${JSON.stringify(end)}, ${words.join(", ")}.`);
  $("#recorded-settings").hidden = false;
}

function endRun(phase, sentence) {
  closeSocket();
  showClock();
  busy = false;
  element.dataset.stopping = "no";
  $(".cockpit").dataset.phase = phase;
  setText($("#status"), sentence);
  markButtons();
}

function markButtons() {
  for (const id of ["run", "repeat"]) document.getElementById(id)?.setAttribute("aria-disabled", String(busy && !displaying()));
  document.getElementById("stop")?.setAttribute("aria-disabled", String(!busy && !displaying()));
}

function stop() {
  if (displaying()) return displayAll();
  if (!busy || element.dataset.stopping === "yes") return;
  element.dataset.stopping = "yes";
  skipPacing = true;
  setStatus("stopping", "");
  run === null ? (stopRequested = true) : server.stop_run(run);
}
