// State and lanes of the run. A frame is a JSON string with the records from index `at` on and the current state.
// Texts of models and visitors are inserted with textContent, never as markup.
window.specdemoListeners?.abort(); // gradio may mount this component again
const listeners = (window.specdemoListeners = new AbortController());
const $ = (selector, within = element) => within.querySelector(selector);
const DISCARDED = new Set(["rejected", "ignored"]);
const FRAME_TIMEOUT_MS = 2500; // without a frame for this long, request missed records
const HEADINGS = { spec: "Speculative", ar: "Autoregressive (baseline)", third: "Third run", fourth: "Fourth run" };

let run = null; // id of the displayed run
let started = null; // id of the run that Run started last, in use before its first frame
let busy = false; // from Run until the last frame
let received = 0; // number of records
let pending = []; // records not drawn yet
let state = null; // latest frame
let drawing = false;
let catchingUp = false;
let frozen = false; // Stop was pressed during a paced display: the rest is shown on request
let startedAt = 0;
let lastFrameAt = 0;
const earlierRuns = new Set(); // ids of earlier runs, whose last frames may still arrive
const cellOf = new WeakMap(); // token span -> [cell, step index, template of its explanation]
const lanes = {}; // name -> { box, lane, steps: [{ span, t, tokens }], shown }; `tokens` are committed up to that step

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

function receiveFrame(frame) {
  if (!frame || earlierRuns.has(frame.run) || (state?.over && state.run === frame.run)) return;
  if (frame.run !== run) {
    reset(frame.run, frame.plan);
    if (busy) openSocket(run);
  }
  lastFrameAt = performance.now();
  disconnectedAt = null;
  if (frame.at > received) return catchUp();
  const records = frame.r.slice(received - frame.at);
  received += records.length;
  pending.push(...records);
  updateSpeeds(records);
  state = frame;
  const turn = $("#turn");
  turn.hidden = state.turn < 2;
  setText(turn, `Turn ${state.turn}: earlier answers are part of the prompt.`);
  if (!drawing) schedule();
}

async function catchUp() {
  if (catchingUp) return;
  catchingUp = true;
  const id = run ?? started;
  try {
    const missed = await server.trace_since([id, run === null ? 0 : received]);
    if (id !== (run ?? started)) return;
    if (missed) receiveFrame(JSON.parse(missed));
    else if (missed === undefined) reconnect();
    else if (busy && run !== null) endRun("failed", "failed: the server no longer stores this run");
  } finally {
    catchingUp = false;
  }
}

function reset(id, plan) {
  if (run !== null) earlierRuns.add(run);
  run = element.dataset.run = id;
  received = firstStepAt = 0;
  pending = [];
  frozen = false;
  for (const [name, lane] of Object.entries(lanes)) {
    lane.box.hidden = !plan.includes(name);
    lane.lane.replaceChildren();
    $(".title", lane.box).textContent = $(".model", lane.box).textContent = $(".rate", lane.box).textContent = "";
    $(".badge", lane.box).hidden = true;
    for (const button of lane.box.querySelectorAll("button")) button.disabled = true;
    Object.assign(lane, { steps: [], shown: 0, credit: 0, idle: true, first: null, last: null, fences: 0 });
  }
  $(".lanes").dataset.count = plan.length;
  $(".outcome").hidden = $("#recorded-settings").hidden = true;
  $("#save-all").disabled = $("#save-page").disabled = true;
  clearHeadline();
  endWalk();
  hideTooltip();
  quietUntil = 0;
  closeReplay();
  closeInspector();
}

function draw() {
  if (!drawing) return;
  drawing = false;
  clearTimeout(drawTimer);
  if (state.run !== run) return; // replaced by Run
  const byLane = {};
  const following = []; // lanes scrolled to their end
  for (const record of removeDueRecords()) (byLane[record.l] ??= []).push(record);
  for (const [name, records] of Object.entries(byLane)) {
    const { lane } = lanes[name];
    if (lane.scrollHeight - lane.scrollTop - lane.clientHeight < 40) following.push(lane);
    const fragment = document.createDocumentFragment();
    for (const record of records) {
      if (record.head) drawHead(name, record.head, fragment);
      else if (record.note) fragment.append(make("span", { class: "note", role: "note", text: record.note }));
      else drawStep(name, record, fragment);
    }
    if (lane.lastElementChild?.className === "ahead") lane.lastElementChild.remove();
    lane.append(fragment);
    const { ahead } = records.at(-1); // current continuation of a beam search, which the next step may replace
    if (ahead) lane.append(make("span", { class: "ahead", text: ahead }));
  }
  const ended = state.over && (frozen || !pending.length);
  if (!ended && busy && element.dataset.stopping !== "yes") showPaceStatus();
  showPart();
  if (ended || performance.now() - tilesDrawnAt >= TILES_INTERVAL_MS) drawTiles();
  for (const lane of following) lane.scrollTop = lane.scrollHeight; // last, so the page is laid out once
  if (ended) showResult();
  else if (pending.length && !drawing && !frozen) schedule();
}

function drawHead(name, head, fragment) {
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

function drawStep(name, record, fragment) {
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

function setStatus(phase, text) {
  const root = $(".cockpit");
  if (root.dataset.phase !== phase) root.dataset.phase = phase;
  setText($("#status"), text ? `${phase}: ${text}` : phase);
}

function showMissing(answer) {
  setStatus("failed", answer === undefined ? "the request failed: try again" : "the server no longer stores this run: run it again");
}

function showClock() { if (busy) setText($(".clock"), `${(((complete() ? lastFrameAt : performance.now()) - startedAt) / 1000).toFixed(1)} s`); }

let clock = 0; // timer, which runs during runs only

function startClock() {
  clearInterval(clock);
  clock = setInterval(tick, 100);
}

function tick() {
  if (!busy || listeners.signal.aborted) return clearInterval(clock);
  if (performance.now() - tilesDrawnAt > 1.5 * TILES_INTERVAL_MS) { tilesDrawnAt = performance.now(); showClock(); }
  if (!complete() && performance.now() - lastFrameAt > FRAME_TIMEOUT_MS) { lastFrameAt = performance.now(); catchUp(); }
}

function newRunId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function startRun(id) {
  pause();
  busy = true;
  startClock();
  started = window.specdemoRun = id;
  interrupted = skipPacing = frozen = false;
  endWalk();
  setText($("#headline"), "Running …");
  pending = [];
  startedAt = lastFrameAt = performance.now();
  if (run !== null) earlierRuns.add(run);
  run = null;
  showPart();
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
  const same = $("#sameness"), compared = Object.values(state.texts).find(([, , tone]) => tone); // texts that must agree
  same.hidden = !compared;
  if (compared) {
    const [badge, why, tone] = compared;
    same.textContent = badge;
    same.dataset.tone = tone;
    setText($("#verdict"), [state.verdict, why].filter(Boolean).join(" "));
  }
  $(".outcome").hidden = !$("#verdict").textContent;
  if (state.phase[0] === "done" && state.turn) document.body.dataset.turn = state.turn;
  else delete document.body.dataset.turn;
  for (const [name, [badge, why]] of Object.entries(state.texts)) Object.assign($(".badge", lanes[name].box), { textContent: badge, title: why });
  setText($("#race-lengths"), state.lengths);
  drawPassCosts(state.passes);
  drawRunTable(state.table);
  if (state.recorded) showRecorded(state.recorded);
  const drawn = state.plan.filter((name) => lanes[name].steps.length);
  $("#save-all").disabled = $("#save-page").disabled = !drawn.length;
  if (drawn.length) { openReplay(drawn); openInspector(drawn); }
  if (!pending.length) {
    const ran = busy && !skipPacing;
    endRun(state.phase[0], state.phase.filter(Boolean).join(": "));
    if (walking) beginWalk();
    else if (!(ran && raceOnce())) showHeadline();
  } else endRun("stopped", `stopped: ${lanes[drawn[0] ?? state.plan[0]].steps.at(-1)?.tokens ?? 0} tokens displayed`);
}

function showRecorded({ prompt, ...settings }) {
  const names = ["target", "drafter", "method", "gamma", "temperature", "top_p", "seed", "max_tokens", "mode"];
  if (!settings.target) names.unshift("pair");
  const words = names.filter((name) => (settings[name] || settings[name] === 0) && settings[name] !== "off").map((name) => `${name.replace("_", " ")} ${settings[name]}`);
  const end = prompt.length > 80 ? `…${prompt.slice(-80)}` : prompt; // chat templates begin with instructions
  setText($("#recorded-settings span"), `Example, recorded with the prompt ${JSON.stringify(end)}, ${words.join(", ")}.`);
  $("#recorded-settings").hidden = false;
}

function endRun(phase, sentence) {
  closeSocket();
  showClock();
  busy = false;
  element.dataset.stopping = "no";
  $(".cockpit").dataset.phase = phase;
  setText($("#status"), sentence);
  if (state?.run !== run || !state.headline || pending.length) clearHeadline();
  markButtons();
}

function markButtons() {
  for (const id of ["run", "continue-chat", "repeat"]) document.getElementById(id)?.setAttribute("aria-disabled", String(busy && !displaying()));
  document.getElementById("stop")?.setAttribute("aria-disabled", String(!busy && !displaying()));
}

function stop() {
  frozen ||= displaying() || (busy && paced());
  if (complete() && frozen) { drawing = true; return draw(); }
  if (!busy || element.dataset.stopping === "yes") return;
  element.dataset.stopping = "yes";
  skipPacing = !frozen;
  setStatus("stopping", "");
  requestStop();
}

async function requestStop() {
  const id = started;
  if ((await server.stop_run(id)) !== undefined || id !== started || !busy) return;
  element.dataset.stopping = "no";
  frozen = false;
  setStatus(state?.phase[0] ?? "queued", "the stop request failed: press Stop again");
}
