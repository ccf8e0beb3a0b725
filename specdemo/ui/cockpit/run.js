// The displayed run: its frames, status and end. A frame has the records from index `at` on and the current state.

import { make, setText } from "./elements.js";
import { placeGuesses } from "./guesses.js";
import { clearHeadline, showHeadline } from "./headline.js";
import { closeInspector, openInspector } from "./inspector.js";
import { addRecords, drawHead, drawStep } from "./lanes.js";
import { cancelDrawing, isPaced, removeDueRecords, resetPace, schedule, showPaceStatus, updateSpeeds } from "./pace.js";
import { closeReplay, openReplay, pause, raceOnce, showPart } from "./replay.js";
import { $, isComplete, current, isDisplaying, element, laneName, lanes, trigger } from "./state.js";
import { drawTiles, TILES_INTERVAL_MS, tilesAge } from "./tiles.js";
import { drawPassCosts, drawRunTable } from "./timeline.js";
import { resetTooltip } from "./tooltip.js";
import { beginConnection, closeSocket, fetchFrame, follow, noteFrame, requestStop } from "./transport.js";
import { beginWalk, endWalk } from "./walkthrough.js";

const FRAME_TIMEOUT_MS = 2500; // without a frame for this long, request missed records

let startedAt = 0;
let lastFrameAt = 0;
const earlierRuns = new Set(); // ids of earlier runs, whose last frames may still arrive

export function receiveFrame(frame) {
  if (!frame || earlierRuns.has(frame.run) || (current.frame?.over && current.frame.run === frame.run)) return;
  const isNew = frame.run !== current.run;
  if (isNew) reset(frame.run, frame.plan);
  lastFrameAt = performance.now();
  if (isWaiting()) startedAt = lastFrameAt; // of the first frame that is not queued
  noteFrame();
  if (frame.at > current.records.length) return fetchFrame();
  const records = frame.r.slice(current.records.length - frame.at);
  current.records.push(...records);
  current.pending.push(...records);
  addRecords(records);
  updateSpeeds(records);
  current.frame = frame;
  const turn = $("#turn");
  turn.hidden = current.frame.turn < 2;
  setText(turn, turn.hidden ? "" : `Turn ${current.frame.turn}: earlier answers are part of the prompt.`);
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

export function draw() {
  if (!current.drawing) return;
  current.drawing = false;
  cancelDrawing();
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

export function setStatus(phase, text) {
  const root = $(".cockpit");
  if (root.dataset.phase !== phase) root.dataset.phase = phase;
  setText($("#status"), text ? `${phase}: ${text}` : phase);
}

export function showMissing(answer) {
  setStatus("failed", answer === undefined ? "the request failed: try again" : "the server no longer stores this run: run it again");
}

function isWaiting() { return current.frame?.run !== current.started || current.frame.phase[0] === "queued"; }

export function showClock() {
  if (!current.busy) return;
  const now = isComplete() ? lastFrameAt : performance.now();
  setText($(".clock"), isWaiting() ? "" : `${((now - startedAt) / 1000).toFixed(1)} s`);
}

let clock = 0; // timer, which runs during runs only

function startClock() {
  clearInterval(clock);
  clock = setInterval(tick, 100);
}

function tick() {
  if (!current.busy) return clearInterval(clock);
  if (tilesAge() > 1.5 * TILES_INTERVAL_MS) showClock();
  if (!isComplete() && performance.now() - lastFrameAt > FRAME_TIMEOUT_MS) { lastFrameAt = performance.now(); fetchFrame(); }
}

export function newRunId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function startRun(id) {
  pause();
  current.busy = true;
  startClock();
  current.started = window.specdemoRun = id;
  beginConnection();
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

function showResult() {
  for (const name of current.frame.plan) {
    const { box, lane } = lanes[name];
    for (const button of box.querySelectorAll("button")) button.disabled = !lane.childElementCount;
  }
  setText($("#verdict"), current.frame.verdict);
  const same = $("#sameness"), [badge, why, tone] = current.frame.texts[current.frame.plan.find((name) => name !== "ar")] ?? [];
  same.hidden = !tone; // only texts that must agree
  if (tone) {
    same.textContent = badge;
    same.dataset.tone = tone;
    setText($("#verdict"), [current.frame.verdict, why].filter(Boolean).join(" "));
  }
  $(".outcome").hidden = !$("#verdict").textContent;
  if (current.frame.turn && current.frame.phase[0] !== "failed") document.body.dataset.turn = current.frame.turn;
  else delete document.body.dataset.turn;
  for (const name of current.frame.plan) setText($("h2", lanes[name].box), laneName(name));
  for (const [name, [badge, why]] of Object.entries(current.frame.texts)) Object.assign($(".badge", lanes[name].box), { textContent: badge, title: why });
  setText($("#race-lengths"), current.frame.lengths);
  drawPassCosts(current.frame.passes);
  drawRunTable(current.frame.table);
  if (current.frame.recorded) showRecorded(current.frame.recorded);
  const drawn = current.frame.plan.filter((name) => lanes[name].steps.length);
  $("#save-all").disabled = $("#save-page").disabled = !drawn.length;
  if (drawn.length) { openReplay(drawn); openInspector(drawn); }
  trigger("change"); // views in the selected tab show the displayed run
  if (!current.pending.length) {
    const ran = current.busy && !current.skipPacing;
    endRun(current.frame.phase[0], current.frame.phase.filter(Boolean).join(": "));
    if (current.walking) beginWalk();
    else if (!(ran && raceOnce())) showHeadline();
  } else endRun("stopped", `stopped: ${lanes[drawn[0] ?? current.frame.plan[0]].steps.at(-1)?.tokens ?? 0} tokens displayed`);
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

export function markButtons() {
  for (const id of ["run", "continue-chat", "repeat"]) document.getElementById(id)?.setAttribute("aria-disabled", String(current.busy && !isDisplaying()));
  document.getElementById("stop")?.setAttribute("aria-disabled", String(!current.busy && !isDisplaying()));
}

export function stop() {
  current.frozen ||= isDisplaying() || (current.busy && isPaced());
  if (isComplete() && current.frozen) { current.drawing = true; return draw(); }
  if (!current.busy || element.dataset.stopping === "yes") return;
  element.dataset.stopping = "yes";
  current.skipPacing = !current.frozen;
  setStatus("stopping", "");
  sendStop();
}

async function sendStop() {
  const id = current.started;
  if ((await requestStop(id)) || id !== current.started || !current.busy) return;
  element.dataset.stopping = "no";
  current.frozen = false;
  setStatus(current.frame?.phase[0] ?? "queued", "the stop request failed: press Stop again");
}
