// Frames of a run over a WebSocket, which costs the decoding thread less than gradio events (the fallback).
// After an interruption of the network Gradio reloads the page, which then resumes the run.

import { endRun, receiveFrame, setStatus, startRun } from "./run.js";
import { complete, current, listeners, pageRoot, server } from "./state.js";

const RETRY_MS = 1000, RECONNECT_TIMEOUT_MS = 20000;
const RESUME_KEY = "specdemo-run";

let socket = null;
let retry = 0;
let disconnectedAt = null; // first failure since the last frame
let interrupted = false;

const framesOf = (id) => new URL(`frames/${id}`, pageRoot()).href;

export function openSocket(id, from = null) {
  closeSocket();
  const opened = (socket = new WebSocket(`${framesOf(id).replace(/^http/, "ws")}${from === null ? "" : `?from=${from}`}`));
  let delivered = false;
  socket.onmessage = ({ data }) => { delivered = true; receiveFrame(JSON.parse(data)); };
  socket.onclose = () => { if (opened === socket && current.busy && (delivered || interrupted)) reconnect(); };
}

export function closeSocket() {
  clearTimeout(retry);
  const closing = socket;
  socket = null; // its `onclose` must not reconnect
  closing?.close();
}

export function isConnected() { disconnectedAt = null; }

export function forgetInterruption() { interrupted = false; }

export function reconnect() {
  if (!current.busy || current.run === null || complete()) return;
  interrupted = true;
  disconnectedAt ??= performance.now();
  if (performance.now() - disconnectedAt > RECONNECT_TIMEOUT_MS) return endRun("failed", "failed: the server is not reachable");
  setStatus("reconnecting", "");
  clearTimeout(retry);
  retry = setTimeout(() => { if (current.busy) openSocket(current.run, current.records.length); }, RETRY_MS);
}

export async function resume() {
  const id = sessionStorage.getItem(RESUME_KEY);
  sessionStorage.removeItem(RESUME_KEY);
  if (id) await resumeRun(id, performance.now() + RECONNECT_TIMEOUT_MS);
}

async function resumeRun(id, end) {
  const text = await server.trace_since([id, 0]);
  if (current.busy || current.run !== null) return;
  if (text) {
    startRun(id);
    current.skipPacing = true;
    return receiveFrame(JSON.parse(text));
  }
  if (text === null) return; // no longer stored
  if (performance.now() > end) return setStatus("failed", "the server is not reachable");
  setStatus("reconnecting", "");
  retry = setTimeout(() => resumeRun(id, end), RETRY_MS);
}

export function connectSocket() {
  window.addEventListener("offline", () => { closeSocket(); reconnect(); }, { signal: listeners.signal });
  window.navigation?.addEventListener("navigate", ({ navigationType, userInitiated }) => {
    interrupted ||= navigationType === "reload" && !userInitiated; // by Gradio
  }, { signal: listeners.signal });
  window.addEventListener("pagehide", () => {
    if (complete() && current.pending.length) sessionStorage.setItem(RESUME_KEY, current.run);
    else if (current.busy && interrupted) sessionStorage.setItem(RESUME_KEY, current.started);
    else if (current.busy) navigator.sendBeacon(framesOf(current.started), new Blob(["{}"], { type: "application/json" })); // with any transport
  }, { signal: listeners.signal });
}
