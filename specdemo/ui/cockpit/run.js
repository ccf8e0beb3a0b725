// The displayed run. Requests: start, frames over a WebSocket, frames on request without one or after an interruption, and
// stop. A frame has the records from index `at` on and the current state. After an interruption of its events Gradio
// reloads the page, which then resumes the run.

import { make, setText } from "./elements.js";
import { closeInspector, openInspector } from "./inspector.js";
import { addRecords, drawHead, drawStep, placeGuesses } from "./lanes.js";
import { isPaced, PACE, removeDueRecords, resetPace, updateSpeeds } from "./pace.js";
import { beginWalk, closeReplay, endWalk, openReplay, pause, raceOnce, replayClock, seek, showPart } from "./replay.js";
import { clearHeadline, drawPassCosts, drawRunTable, showHeadline, showPosition, showRates } from "./result.js";
import { settings, storedLanes } from "./settings.js";
import { $, isComplete, current, isDisplaying, element, laneName, lanes, listeners, pageRoot, readStored, store, trigger } from "./state.js";
import { resetTooltip } from "./tooltip.js";

const RETRY_MS = 1000, RECONNECT_TIMEOUT_MS = 20000, OPEN_TIMEOUT_MS = 2500, POLL_MS = 500;
const FRAME_TIMEOUT_MS = 2500; // without a frame for this long, request missed records
const PACED_TICK_MS = 50, TILES_INTERVAL_MS = 250, CLOCK_INTERVAL_MS = 100;
const DRAW_TIMEOUT_MS = 500; // draw without an animation frame: the tab may have been hidden meanwhile
const RESUME_KEY = "specdemo-run";

let startedAt = 0;
let lastFrameAt = 0;
let tilesDrawnAt = 0;
let drawTimer = 0;
let clock = 0; // timer, which runs during runs only
const earlierRuns = new Set(); // ids of earlier runs, whose last frames may still arrive

let socket = null;
let retry = 0;
let disconnectedAt = null; // first failure since the last frame
let interrupted = false;
let lost = false; // the response to the start of the run, or the page that started it
let fetching = null; // id of the run of the request under way

// --- requests --------------------------------------------------------------------------------------------------------

const addressOf = (path) => new URL(path, pageRoot()).href;

export async function request(path, body, signal) { // null if the server is not reachable
  const sent = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return fetch(addressOf(path), { ...sent, signal }).catch(() => null);
}

export async function frameOf(response) { // null if the response failed or is cut off
  return response?.ok ? response.json().catch(() => null) : null;
}

function timeLimit() { return AbortSignal.timeout(RECONNECT_TIMEOUT_MS); } // a lost connection may not end a request

export async function savedTrace(lane) { // or "all"; null: no longer stored, undefined: the request failed
  const response = await request(`traces/${current.run}/${lane}`);
  return response?.ok ? response.text() : response?.status === 404 ? null : undefined;
}

function sendLast(path, body) { navigator.sendBeacon(addressOf(path), new Blob([JSON.stringify(body)], { type: "application/json" })); }

// --- start, and connection -------------------------------------------------------------------------------------------

export async function run(turn) { // of the conversation: new, next or repeat
  if (current.busy && !isDisplaying()) return;
  const id = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  startRun(id);
  const session_hash = window.__gradio_session_hash__; // as in the events of Gradio
  const response = await request("runs", { id, session_hash, settings: settings(), lanes: storedLanes(), turn });
  const frame = await frameOf(response);
  if (!current.busy || current.started !== id) return;
  if (frame) return receiveFrame(frame);
  if (response && !response.ok && response.status < 500) {
    const { detail } = await response.json().catch(() => ({}));
    const ofProxy = `a proxy rejected the run (status ${response.status}): it must pass on all paths below this page`;
    return endRun("failed", `failed: ${detail ?? ofProxy}`);
  }
  lost = true; // perhaps only the response
  fetchFrame();
}

function startRun(id) {
  pause();
  current.busy = true;
  clearInterval(clock);
  clock = setInterval(tick, CLOCK_INTERVAL_MS);
  current.started = window.specdemoRun = id;
  interrupted = lost = current.polling = false;
  disconnectedAt = null;
  current.skipPacing = current.frozen = false;
  endWalk();
  setText($("#headline"), "Running …");
  current.pending = [];
  lastFrameAt = performance.now();
  if (current.run !== null) earlierRuns.add(current.run);
  current.run = null;
  showPart();
  element.dataset.stopping = "no";
  markButtons();
  setStatus("queued", "");
  showClock();
}

function follow(id) {
  closeSocket();
  const opened = (socket = new WebSocket(addressOf(`frames/${id}?from=${current.records.length}`).replace(/^http/, "ws")));
  let delivered = false;
  retry = setTimeout(startPolling, OPEN_TIMEOUT_MS);
  socket.onmessage = ({ data }) => {
    if (!delivered) clearTimeout(retry);
    delivered = true;
    current.polling = false;
    receiveFrame(JSON.parse(data));
  };
  socket.onclose = () => {
    if (opened !== socket || !current.busy) return;
    if (delivered || interrupted) reconnect(); else startPolling();
  };
}

function startPolling() { // a proxy may refuse WebSockets
  current.polling = true;
  clearTimeout(retry);
  retry = setTimeout(async () => {
    await fetchFrame();
    if (current.busy && current.polling && !isComplete()) startPolling();
  }, POLL_MS);
}

async function fetchFrame() {
  const id = current.run ?? current.started;
  if (fetching === id) return;
  fetching = id;
  const response = await request(`frames/${id}?from=${current.run === null ? 0 : current.records.length}`, null, timeLimit());
  const frame = await frameOf(response);
  fetching = null;
  if (!current.busy || id !== (current.run ?? current.started)) return;
  if (frame) return receiveFrame(frame);
  if (response?.status !== 404) return reconnect();
  if (current.run !== null || lost) endRun("failed", "failed: the server no longer stores this run: try again");
}

function reconnect() {
  if (!current.busy || isComplete()) return;
  interrupted = true;
  disconnectedAt ??= performance.now();
  if (performance.now() - disconnectedAt > RECONNECT_TIMEOUT_MS) return endRun("failed", "failed: the server is not reachable");
  setStatus("reconnecting", "");
  clearTimeout(retry);
  retry = setTimeout(async () => {
    await fetchFrame();
    if (current.busy && current.run !== null && disconnectedAt === null && !isComplete()) follow(current.run);
  }, RETRY_MS);
}

function closeSocket() {
  clearTimeout(retry);
  const closing = socket;
  socket = null; // its `onclose` must not reconnect
  closing?.close();
}

export async function resume() {
  const id = readStored(RESUME_KEY, "sessionStorage");
  store(RESUME_KEY, "", "sessionStorage");
  if (!id) return;
  startRun(id);
  current.skipPacing = lost = true;
  await fetchFrame();
}

export function connectTransport() {
  window.addEventListener("offline", () => { closeSocket(); reconnect(); }, { signal: listeners.signal });
  window.navigation?.addEventListener("navigate", ({ navigationType, userInitiated }) => {
    interrupted ||= navigationType === "reload" && !userInitiated; // by Gradio
  }, { signal: listeners.signal });
  window.addEventListener("pagehide", ({ persisted }) => {
    if (isComplete() && current.pending.length) store(RESUME_KEY, current.run, "sessionStorage");
    else if (current.busy && interrupted) store(RESUME_KEY, current.started, "sessionStorage");
    else if (current.busy) sendLast(`frames/${current.started}`, {});
    if (!persisted) sendLast("sessions", { session_hash: window.__gradio_session_hash__ });
  }, { signal: listeners.signal });
}

// --- frames ----------------------------------------------------------------------------------------------------------

export function receiveFrame(frame) {
  if (!frame || earlierRuns.has(frame.run) || (current.frame?.over && current.frame.run === frame.run)) return;
  const isNew = frame.run !== current.run;
  if (isNew) reset(frame.run, frame.plan);
  lastFrameAt = performance.now();
  if (isWaiting()) startedAt = lastFrameAt; // of the first frame that is not queued
  disconnectedAt = null;
  if (frame.at > current.records.length) return fetchFrame();
  const records = frame.r.slice(current.records.length - frame.at);
  current.records.push(...records);
  current.pending.push(...records);
  addRecords(records);
  updateSpeeds(records);
  current.frame = frame;
  const turn = $("#turn");
  turn.hidden = frame.turn < 2;
  setText(turn, turn.hidden ? "" : `Turn ${frame.turn}: earlier answers are part of the prompt.`);
  if (!current.drawing) schedule();
  if (current.busy && frame.over) trigger("submit", { run: frame.run }); // the page shows the conversation
  else if (current.busy && isNew) follow(frame.run);
}

function reset(id, plan) {
  if (current.run !== null) earlierRuns.add(current.run);
  current.run = element.dataset.run = id;
  current.records = [];
  resetPace();
  current.pending = [];
  current.frozen = false;
  for (const [name, lane] of Object.entries(lanes)) {
    lane.box.hidden = !plan.includes(name);
    lane.lane.replaceChildren();
    $(".title", lane.box).textContent = $(".model", lane.box).textContent = $(".rate", lane.box).textContent = "";
    $(".badge", lane.box).hidden = true;
    for (const button of lane.box.querySelectorAll("button")) button.disabled = true;
    Object.assign(lane, { head: null, header: null, records: [], steps: [], shown: 0, credit: 0, behind: false, first: null, last: null, fences: 0, guesses: [], lastLine: 0 });
  }
  $(".lanes").dataset.count = plan.length;
  $(".outcome").hidden = $("#recorded-settings").hidden = $("[data-legend=unseen]").parentElement.hidden = true;
  $("#save-all").disabled = $("#save-page").disabled = true;
  clearHeadline();
  endWalk();
  resetTooltip();
  closeReplay();
  closeInspector();
}

// --- display ---------------------------------------------------------------------------------------------------------

function schedule() {
  current.drawing = true;
  if (document.visibilityState === "hidden") setTimeout(draw, 0); // hidden tabs receive no animation frames
  else if (isPaced()) setTimeout(draw, PACED_TICK_MS);
  else {
    requestAnimationFrame(draw);
    drawTimer = setTimeout(draw, DRAW_TIMEOUT_MS);
  }
}

function draw() {
  if (!current.drawing) return;
  current.drawing = false;
  clearTimeout(drawTimer);
  if (current.frame.run !== current.run) return; // replaced by Run
  const byLane = {};
  const following = []; // lanes scrolled to their end
  for (const record of removeDueRecords()) (byLane[record.l] ??= []).push(record);
  for (const [name, records] of Object.entries(byLane)) {
    const { lane } = lanes[name];
    if (lane.scrollHeight - lane.scrollTop - lane.clientHeight < 40) following.push(lane);
    const fragment = document.createDocumentFragment();
    for (const record of records) {
      if (record.head) drawHead(name, record, fragment);
      else if (record.note) fragment.append(make("span", { class: "note", role: "note", text: record.note }));
      else drawStep(name, record, fragment);
    }
    if (lane.lastElementChild?.className === "ahead") lane.lastElementChild.remove();
    lane.append(fragment);
    const ahead = records.at(-1).step?.pending_text; // current continuation of a beam search, which the next step may replace
    if (ahead) lane.append(make("span", { class: "ahead", text: ahead }));
  }
  const ended = current.frame.over && (current.frozen || !current.pending.length);
  if (!ended && current.busy && element.dataset.stopping !== "yes") showPaceStatus();
  showPart();
  if (ended || tilesAge() >= TILES_INTERVAL_MS) drawTiles();
  for (const name of Object.keys(byLane)) placeGuesses(lanes[name]);
  for (const lane of following) lane.scrollTop = lane.scrollHeight; // last, so the page is laid out once
  if (ended) showResult();
  else if (current.pending.length && !current.drawing && !current.frozen) schedule();
}

function showPaceStatus() {
  const { frame } = current;
  if (!frame.over) {
    const late = current.pending.length > PACE && `displayed at ${PACE} tokens/s`;
    const polled = current.polling && "updated twice per second: no WebSocket could be opened";
    return setStatus(frame.phase[0], [frame.phase[1], late, polled].filter(Boolean).join(", "));
  }
  const rates = frame.plan.map((name) => frame.rates[name].replace(/ tok.*/, "")).filter(Boolean).join(" and ");
  const begins = $(".cockpit").dataset.phase !== "displaying";
  setStatus("displaying", `at ${PACE} tokens/s${rates && `, generated at ${rates} tokens/s`}`);
  if (begins) { markButtons(); drawTiles(); }
}

function tilesAge() { return performance.now() - tilesDrawnAt; } // in milliseconds

function drawTiles() { // less often than the tokens
  tilesDrawnAt = performance.now();
  showPosition();
  showRates();
  showClock();
}

export function displayAll() {
  endWalk();
  current.frozen = false;
  if (isComplete() && !current.pending.length) { // hidden by the replay
    seek(replayClock.end);
    return pause();
  }
  current.skipPacing = current.drawing = true;
  draw();
}

export function setStatus(phase, text) {
  const root = $(".cockpit");
  if (root.dataset.phase !== phase) root.dataset.phase = phase;
  setText($("#status"), text ? `${phase}: ${text}` : phase);
}

export function markButtons() {
  for (const id of ["run", "continue-chat", "repeat"]) document.getElementById(id)?.setAttribute("aria-disabled", String(current.busy && !isDisplaying()));
  document.getElementById("stop")?.setAttribute("aria-disabled", String(!current.busy && !isDisplaying()));
}

function isWaiting() { return current.frame?.run !== current.started || current.frame.phase[0] === "queued"; }

function showClock() {
  if (!current.busy) return;
  const now = isComplete() ? lastFrameAt : performance.now();
  setText($(".clock"), isWaiting() ? "" : `${((now - startedAt) / 1000).toFixed(1)} s`);
}

function tick() {
  if (!current.busy) return clearInterval(clock);
  if (tilesAge() > 1.5 * TILES_INTERVAL_MS) showClock();
  if (!isComplete() && performance.now() - lastFrameAt > FRAME_TIMEOUT_MS) { lastFrameAt = performance.now(); fetchFrame(); }
}

// --- result and end --------------------------------------------------------------------------------------------------

function showResult() {
  const { frame } = current;
  for (const name of frame.plan) {
    const { box, lane } = lanes[name];
    for (const button of box.querySelectorAll("button")) button.disabled = !lane.childElementCount;
  }
  setText($("#verdict"), frame.verdict);
  const same = $("#sameness"), [badge, why, tone] = frame.texts[frame.plan.find((name) => name !== "ar")] ?? [];
  same.hidden = !tone; // only texts that must agree
  if (tone) {
    same.textContent = badge;
    same.dataset.tone = tone;
    setText($("#verdict"), [frame.verdict, why].filter(Boolean).join(" "));
  }
  $(".outcome").hidden = !$("#verdict").textContent;
  if (frame.turn && frame.phase[0] !== "failed") document.body.dataset.turn = frame.turn;
  else delete document.body.dataset.turn;
  for (const name of frame.plan) setText($("h2", lanes[name].box), laneName(name));
  for (const [name, [badge, why]] of Object.entries(frame.texts)) Object.assign($(".badge", lanes[name].box), { textContent: badge, title: why });
  setText($("#race-lengths"), frame.lengths);
  drawPassCosts(frame.passes);
  drawRunTable(frame.table);
  if (frame.recorded) showRecorded(frame.recorded);
  const drawn = frame.plan.filter((name) => lanes[name].steps.length);
  $("#save-all").disabled = $("#save-page").disabled = !drawn.length;
  if (drawn.length) { openReplay(drawn); openInspector(drawn); }
  trigger("change"); // views in the selected tab show the displayed run
  if (!current.pending.length) {
    const ran = current.busy && !current.skipPacing;
    endRun(frame.phase[0], frame.phase.filter(Boolean).join(": "));
    if (current.walking) beginWalk();
    else if (!(ran && raceOnce())) showHeadline();
  } else endRun("stopped", `stopped: ${lanes[drawn[0] ?? frame.plan[0]].steps.at(-1)?.tokens ?? 0} tokens displayed`);
}

function showRecorded({ prompt, ...settings }) {
  const names = ["target", "drafter", "method", "gamma", "temperature", "top_p", "seed", "max_tokens", "mode"];
  if (!settings.target) names.unshift("pair");
  const words = names.filter((name) => (settings[name] || settings[name] === 0) && settings[name] !== "off").map((name) => `${name.replace("_", " ")} ${settings[name]}`);
  const end = prompt.length > 80 ? `…${prompt.slice(-80)}` : prompt; // chat templates begin with instructions
  setText($("#recorded-settings span"), `Example, recorded with the prompt ${JSON.stringify(end)}, ${words.join(", ")}.`);
  $("#recorded-settings").hidden = false;
}

export function endRun(phase, sentence) {
  closeSocket();
  setText($(".clock"), ""); // of the complete run; the time axis shows those of its lanes
  current.busy = false;
  element.dataset.stopping = "no";
  $(".cockpit").dataset.phase = phase;
  setText($("#status"), sentence);
  if (current.frame?.run !== current.run || !current.frame.headline || current.pending.length) clearHeadline();
  markButtons();
}

export async function stop() {
  current.frozen ||= isDisplaying() || (current.busy && isPaced());
  if (isComplete() && current.frozen) { current.drawing = true; return draw(); }
  if (!current.busy || element.dataset.stopping === "yes") return;
  element.dataset.stopping = "yes";
  current.skipPacing = !current.frozen;
  setStatus("stopping", "");
  const id = current.started;
  const response = await request(`frames/${id}`, {}, timeLimit());
  if (response?.ok || id !== current.started || !current.busy) return;
  element.dataset.stopping = "no";
  current.frozen = false;
  setStatus(current.frame?.phase[0] ?? "queued", "the stop request failed: press Stop again");
}
