// The run as it is drawn. Frames come as JSON strings: new records from index `at` on, and the present state.
// Whatever was written by a model or a visitor reaches the page through textContent, never as markup.
const $ = (selector, within = element) => within.querySelector(selector);
const NOT_KEPT = new Set(["rejected", "ignored"]);
const PATIENCE_MS = 2500; // without a frame for this long, ask: frames may have been lost

let run = null; // id of the run on show
let busy = false; // from the press of Run until the last frame
let have = 0; // records received
let pending = []; // records received and not yet drawn
let state = null; // the newest frame without its records
let drawing = false;
let asking = false;
let stopWanted = false;
let began = 0;
let heard = 0;
const past = new Set(); // earlier runs, whose last frames may still arrive
const cellOf = new WeakMap(); // token span -> [cell, step index, spans of the same step]
const points = { spec: [], ar: [] }; // per lane: [seconds, tokens so far]

// --- receiving -------------------------------------------------------------------------------------------------

function take(frame) {
  if (!frame || past.has(frame.run)) return;
  if (frame.run !== run) reset(frame.run, frame.plan);
  heard = performance.now();
  if (stopWanted) { stopWanted = false; server.stop_run(run); }
  if (frame.at > have) return catchUp();
  const fresh = frame.r.slice(have - frame.at);
  have += fresh.length;
  pending.push(...fresh);
  state = frame;
  if (drawing) return;
  drawing = true;
  // a hidden tab gets no animation frames
  document.visibilityState === "hidden" ? setTimeout(draw, 0) : requestAnimationFrame(draw);
}

async function catchUp() {
  if (asking || run === null) return;
  asking = true;
  try {
    const missed = await server.trace_since([run, have]);
    if (missed) take(JSON.parse(missed));
    else if (busy) over("failed", "failed: the server no longer knows this run");
  } catch {
    if (busy) over("failed", "failed: the server cannot be reached");
  } finally {
    asking = false;
  }
}

function reset(id, plan) {
  if (run !== null) past.add(run);
  run = id;
  have = 0;
  pending = [];
  for (const name of ["spec", "ar"]) {
    const box = $(`[data-lane=${name}]`);
    box.hidden = !plan.includes(name);
    $(".lane", box).replaceChildren();
    $(".title", box).textContent = $(".rate", box).textContent = "";
    $(".badge", box).hidden = true;
    $(".save", box).disabled = true;
    points[name] = [];
  }
  $("#verdict").hidden = true;
  hideTip();
}

// --- drawing ---------------------------------------------------------------------------------------------------

function draw() {
  drawing = false;
  const lanes = {};
  for (const record of pending) (lanes[record.l] ??= []).push(record);
  pending = [];
  for (const [name, records] of Object.entries(lanes)) {
    const lane = $(`#lane-${name}`);
    const atBottom = lane.scrollHeight - lane.scrollTop - lane.clientHeight < 40;
    const fragment = document.createDocumentFragment();
    for (const record of records) record.head ? drawHead(name, record.head, fragment) : drawStep(name, record, fragment);
    $(".ahead", lane)?.remove();
    lane.append(fragment);
    drawAhead(lane, records.at(-1).ahead);
    if (atBottom) lane.scrollTop = lane.scrollHeight;
  }
  for (const [name, [value, note]] of Object.entries(state.tiles)) {
    const tile = $(`[data-kpi=${name}]`);
    setText($(".value", tile), value);
    setText($(".note", tile), note);
  }
  for (const [name, rate] of Object.entries(state.rates)) setText($(`[data-lane=${name}] .rate`), rate);
  spark();
  if (state.over) return finish();
  if (busy && element.dataset.stopping !== "yes") say(state.phase[0], state.phase[1]);
}

function drawHead(name, head, fragment) {
  const box = $(`[data-lane=${name}]`);
  $(".title", box).textContent = head.title;
  const badge = $(".badge", box);
  badge.hidden = false;
  badge.dataset.exact = head.exact;
  badge.textContent = head.badge;
  badge.title = head.why;
  const prompt = document.createElement("span");
  prompt.className = "given";
  prompt.textContent = head.prompt;
  fragment.append(prompt);
}

function drawStep(name, record, fragment) {
  const spans = [];
  for (const cell of record.c) {
    const [kind, text] = cell;
    const span = document.createElement("span");
    span.className = "tok";
    span.dataset.kind = kind;
    span.textContent = NOT_KEPT.has(kind) ? text.replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥") : text;
    if (!NOT_KEPT.has(kind) && text.startsWith("\n")) span.dataset.newline = "";
    cellOf.set(span, [cell, record.i, spans]);
    spans.push(span);
  }
  fragment.append(...spans);
  const line = points[name];
  const kept = record.c.filter(([kind]) => !NOT_KEPT.has(kind)).length;
  line.push([record.t, (line.at(-1)?.[1] ?? 0) + kept]);
}

function drawAhead(lane, text) { // how a search would go on, which the next round may think better of
  if (!text) return;
  const span = document.createElement("span");
  span.className = "ahead";
  span.textContent = text;
  lane.append(span);
}

function spark() {
  const canvas = $(".spark");
  const [width, height, scale] = [canvas.clientWidth, canvas.clientHeight, window.devicePixelRatio || 1];
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const curves = Object.entries(points).map(([name, line]) => [name, speeds(line)]).filter(([, s]) => s.length > 1);
  if (!curves.length) return;
  const top = Math.max(...curves.flatMap(([, s]) => s.map(([, y]) => y))) * 1.1;
  const end = Math.max(...curves.map(([, s]) => s.at(-1)[0]));
  const style = getComputedStyle(element);
  for (const [name, curve] of curves) {
    pen.beginPath();
    for (const [x, y] of curve) pen.lineTo((x / end) * (width - 2) + 1, height - 1 - (y / top) * (height - 3));
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    pen.setLineDash(name === "ar" && curves.length > 1 ? [3, 3] : []);
    pen.strokeStyle = style.getPropertyValue(name === "ar" && curves.length > 1 ? "--quiet" : "--ink");
    pen.stroke();
  }
}

function speeds(line) { // tokens per second over the latest eight steps; the prefill is left out
  const out = [];
  for (let i = 4; i < line.length; i++) {
    const [t0, n0] = line[Math.max(0, i - 8)];
    const [t1, n1] = line[i];
    if (t1 > t0) out.push([t1 - line[0][0], (n1 - n0) / (t1 - t0)]);
  }
  return out;
}

// --- what is going on, in words --------------------------------------------------------------------------------

function setText(node, text) { if (node.textContent !== text) node.textContent = text; }

function say(phase, text) {
  const root = $(".cockpit");
  if (root.dataset.phase !== phase) root.dataset.phase = phase;
  setText($("#status"), text ? `${phase}: ${text}` : phase);
}

function tick() {
  if (!busy) return;
  setText($(".clock"), `${((performance.now() - began) / 1000).toFixed(1)} s`);
  if (run !== null && performance.now() - heard > PATIENCE_MS) { heard = performance.now(); catchUp(); }
}

function press() {
  busy = true;
  stopWanted = false;
  began = heard = performance.now();
  if (run !== null) past.add(run);
  run = null;
  element.dataset.stopping = "no";
  markButtons();
  say("queued", "");
  tick();
}

function finish() {
  for (const name of state.plan) $(`#trace-${name}`).disabled = !$(`#lane-${name}`).childElementCount;
  setText($("#verdict"), state.verdict);
  $("#verdict").hidden = !state.verdict;
  over(state.phase[0], state.phase.filter(Boolean).join(": "));
}

function over(phase, sentence) {
  tick();
  busy = false;
  element.dataset.stopping = "no";
  $(".cockpit").dataset.phase = phase;
  setText($("#status"), sentence);
  markButtons();
}

function markButtons() {
  document.getElementById("run")?.setAttribute("aria-disabled", busy);
  document.getElementById("stop")?.setAttribute("aria-disabled", !busy);
}

function stop() {
  if (!busy || element.dataset.stopping === "yes") return;
  element.dataset.stopping = "yes";
  say("stopping", "");
  run === null ? (stopWanted = true) : server.stop_run(run);
}

// --- one token, in detail --------------------------------------------------------------------------------------

function explain([kind, , , p, q, draw]) {
  if (kind === "ignored") return "Never tested: a draft before it was not kept.";
  if (kind === "correction") return "The target's own choice where a draft was rejected.";
  if (kind === "bonus") return "The whole draft was kept; this one came with the same target pass.";
  if (kind === "plain") return "The target's own choice; nothing was drafted.";
  const bound = chance(p, q);
  if (draw === null) return kind === "accepted" ? "Kept by the rule, without a draw." : "Turned down by the rule, without a draw.";
  return kind === "accepted" ? `Kept: the draw is below ${show(bound)}.` : `Rejected: the draw is not below ${show(bound)}.`;
}

function chance(p, q) { return p === null ? null : Math.min(1, p / (q ?? 1)); }
function show(x) { return x === null ? "–" : x !== 0 && x < 0.001 ? x.toExponential(1) : x.toFixed(3); }

function showTip(span) {
  hideTip();
  const [cell, step, mates] = cellOf.get(span);
  const [kind, text, id, p, q, draw] = cell;
  const drafted = p !== null;
  const rows = [["token", `${JSON.stringify(text)} · id ${id}`], ["step", String(step)]];
  if (drafted) {
    rows.push(["p, target", show(p)], ["q, drafter", q === null ? "point mass" : show(q)]);
    rows.push(["min(1, p/q)", show(chance(p, q))], ["draw", draw === null ? "none" : show(draw)]);
  }
  const tip = $("#tip");
  const heading = document.createElement("strong");
  heading.textContent = kind === "ignored" ? "never tested" : kind;
  const list = document.createElement("dl");
  for (const [name, value] of rows) {
    const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
    dt.textContent = name;
    dd.textContent = value;
    list.append(dt, dd);
  }
  const words = document.createElement("p");
  words.textContent = explain(cell);
  tip.dataset.kind = kind;
  tip.replaceChildren(heading, list, words);
  tip.hidden = false;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const below = at.bottom + 8 + size.height < window.innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, window.innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - size.height - 8)}px`;
  for (const mate of mates) mate.classList.add("mate");
  span.setAttribute("aria-describedby", "tip");
}

function hideTip() {
  $("#tip").hidden = true;
  for (const span of element.querySelectorAll(".mate")) span.classList.remove("mate");
  for (const span of element.querySelectorAll("[aria-describedby]")) span.removeAttribute("aria-describedby");
}

function walk(lane, key) { // a lane is one stop of the Tab key; the arrows go from token to token inside it
  const shown = [...lane.querySelectorAll(".tok")].filter((span) => span.getClientRects().length);
  if (!shown.length) return false;
  const here = shown.indexOf(document.activeElement);
  const next = { ArrowRight: here + 1, ArrowLeft: here < 0 ? shown.length - 1 : here - 1, Home: 0, End: shown.length - 1 }[key];
  if (next === undefined) return false;
  const span = shown[Math.max(0, Math.min(next, shown.length - 1))];
  span.tabIndex = -1;
  span.focus();
  return true;
}

for (const lane of element.querySelectorAll(".lane")) {
  lane.addEventListener("pointerover", (e) => { const span = e.target.closest(".tok"); span ? showTip(span) : hideTip(); });
  lane.addEventListener("pointerleave", hideTip);
  lane.addEventListener("scroll", () => { if (!lane.contains(document.activeElement)) hideTip(); });
  lane.addEventListener("focusin", (e) => { if (e.target.matches(".tok")) showTip(e.target); });
  lane.addEventListener("focusout", hideTip);
  lane.addEventListener("keydown", (e) => { if (!e.ctrlKey && !e.metaKey && !e.altKey && walk(lane, e.key)) e.preventDefault(); });
}

// --- the rest of the page --------------------------------------------------------------------------------------

const before = window.specdemoListeners;
before?.abort(); // gradio may mount this component again
const listeners = (window.specdemoListeners = new AbortController());
const always = { capture: true, signal: listeners.signal };

document.addEventListener("click", (e) => {
  if (e.target.closest("#stop")) return stop();
  if (!e.target.closest("#run")) return;
  if (busy) { e.stopImmediatePropagation(); e.preventDefault(); return; }
  press();
}, always);

document.addEventListener("keydown", (e) => {
  if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) {
    e.preventDefault();
    e.stopImmediatePropagation(); // to a focused checkbox, Enter would mean something else
    document.getElementById("run").click();
  }
  if (e.key === "Escape" && !e.target.closest?.("[aria-expanded=true]")) { hideTip(); stop(); } // there it closes a list
}, always);

window.addEventListener("specdemo:failed", () => {
  if (busy) over("failed", "failed: the server did not take the run; try again");
}, { signal: listeners.signal });

window.addEventListener("resize", spark, { signal: listeners.signal });

$("#show-rejected").addEventListener("change", (e) => $(".cockpit").classList.toggle("only-kept", !e.target.checked));

for (const name of ["spec", "ar"]) {
  $(`#trace-${name}`).addEventListener("click", async () => {
    const text = await server.trace([run, name]);
    if (!text) return say("failed", "the server no longer holds this trace: run it again");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/x-ndjson" }));
    link.download = `specdemo-${name}.jsonl`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

if (window.innerWidth < 769) { // gradio's sidebar comes some time after this, opens, and would cover a narrow page
  let calm = 0;
  const fold = () => {
    const handle = document.querySelector("#settings.open > button");
    handle?.click();
    calm = handle || !document.getElementById("settings") ? 0 : calm + 1;
    if (calm < 20 && !listeners.signal.aborted) requestAnimationFrame(fold);
  };
  fold();
}

const clock = setInterval(tick, 100);
listeners.signal.addEventListener("abort", () => clearInterval(clock));
markButtons();
watch("value", () => { if (props.value) take(JSON.parse(props.value)); });
