// Frames of a run over a WebSocket, which costs the decoding thread less than gradio events (the fallback).
// After an interruption of the network Gradio reloads the page, which then resumes the run.

const RETRY_MS = 1000, RECONNECT_TIMEOUT_MS = 20000;
const RESUME_KEY = "specdemo-run";

let socket = null;
let retry = 0;
let disconnectedAt = null; // first failure since the last frame
let interrupted = false;

const pageRoot = () => `${window.gradio_config?.root ?? location.origin}/`;

const framesOf = (id) => new URL(`frames/${id}`, pageRoot()).href;

function openSocket(id, from = null) {
  closeSocket();
  const opened = (socket = new WebSocket(`${framesOf(id).replace(/^http/, "ws")}${from === null ? "" : `?from=${from}`}`));
  let delivered = false;
  socket.onmessage = ({ data }) => { delivered = true; receiveFrame(JSON.parse(data)); };
  socket.onclose = () => { if (opened === socket && busy && (delivered || interrupted)) reconnect(); };
}

function closeSocket() {
  clearTimeout(retry);
  const closing = socket;
  socket = null; // its `onclose` must not reconnect
  closing?.close();
}

function reconnect() {
  if (!busy || run === null || complete()) return;
  interrupted = true;
  disconnectedAt ??= performance.now();
  if (performance.now() - disconnectedAt > RECONNECT_TIMEOUT_MS) return endRun("failed", "failed: the server is not reachable");
  setStatus("reconnecting", "");
  clearTimeout(retry);
  retry = setTimeout(() => { if (busy) openSocket(run, received); }, RETRY_MS);
}

async function resume() {
  const id = sessionStorage.getItem(RESUME_KEY);
  sessionStorage.removeItem(RESUME_KEY);
  if (id) await resumeRun(id, performance.now() + RECONNECT_TIMEOUT_MS);
}

async function resumeRun(id, end) {
  const text = await server.trace_since([id, 0]);
  if (busy || run !== null) return;
  if (text) {
    startRun(id);
    skipPacing = true;
    return receiveFrame(JSON.parse(text));
  }
  if (text === null) return; // no longer stored
  if (performance.now() > end) return setStatus("failed", "the server is not reachable");
  setStatus("reconnecting", "");
  retry = setTimeout(() => resumeRun(id, end), RETRY_MS);
}

window.addEventListener("offline", () => { closeSocket(); reconnect(); }, { signal: listeners.signal });
window.navigation?.addEventListener("navigate", ({ navigationType, userInitiated }) => {
  interrupted ||= navigationType === "reload" && !userInitiated; // by Gradio
}, { signal: listeners.signal });
window.addEventListener("pagehide", () => {
  if (complete() && pending.length) sessionStorage.setItem(RESUME_KEY, run);
  else if (busy && interrupted) sessionStorage.setItem(RESUME_KEY, started);
  else if (busy) navigator.sendBeacon(framesOf(started), new Blob(["{}"], { type: "application/json" })); // with any transport
}, { signal: listeners.signal });
