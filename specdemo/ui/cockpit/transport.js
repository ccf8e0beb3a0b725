// Requests about runs: start, frames over a WebSocket, frames on request without one or after an interruption, and stop.
// After an interruption of its events Gradio reloads the page, which then resumes the run.

import { endRun, newRunId, receiveFrame, setStatus, startRun } from "./run.js";
import { settings, storedLanes } from "./settings.js";
import { isComplete, current, isDisplaying, listeners, pageRoot } from "./state.js";
import { readStored, store } from "./storage.js";

const RETRY_MS = 1000, RECONNECT_TIMEOUT_MS = 20000, OPEN_TIMEOUT_MS = 2500, POLL_MS = 500;
const RESUME_KEY = "specdemo-run";

let socket = null;
let retry = 0;
let disconnectedAt = null; // first failure since the last frame
let interrupted = false;
let lost = false; // the response to the start of the run, or the page that started it
let fetching = null; // id of the run of the request under way

const addressOf = (path) => new URL(path, pageRoot()).href;

export async function request(path, body, signal) { // null if the server is not reachable
  const sent = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return fetch(addressOf(path), { ...sent, signal }).catch(() => null);
}

export async function frameOf(response) { // null if the response failed or is cut off
  return response?.ok ? response.json().catch(() => null) : null;
}

function timeLimit() { return AbortSignal.timeout(RECONNECT_TIMEOUT_MS); } // a lost connection may not end a request

export async function run(turn) { // of the conversation: new, next or repeat
  if (current.busy && !isDisplaying()) return;
  const id = newRunId();
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

export function follow(id) {
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

export async function fetchFrame() {
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

export function closeSocket() {
  clearTimeout(retry);
  const closing = socket;
  socket = null; // its `onclose` must not reconnect
  closing?.close();
}

export function beginConnection() {
  interrupted = lost = current.polling = false;
  disconnectedAt = null;
}

export function noteFrame() { disconnectedAt = null; }

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

export async function savedTrace(lane) { // or "all"; null: no longer stored, undefined: the request failed
  const response = await request(`traces/${current.run}/${lane}`);
  return response?.ok ? response.text() : response?.status === 404 ? null : undefined;
}

export async function requestStop(id) { return Boolean((await request(`frames/${id}`, {}, timeLimit()))?.ok); } // false if it failed

export async function resume() {
  const id = readStored(RESUME_KEY, "sessionStorage");
  store(RESUME_KEY, "", "sessionStorage");
  if (!id) return;
  startRun(id);
  current.skipPacing = lost = true;
  await fetchFrame();
}

function sendLast(path, body) { navigator.sendBeacon(addressOf(path), new Blob([JSON.stringify(body)], { type: "application/json" })); }

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
