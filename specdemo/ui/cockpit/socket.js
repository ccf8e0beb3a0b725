// Frames of a run over a WebSocket, which costs the decoding thread less than gradio events (the fallback).
// After an interruption of the network Gradio reloads the page, which then resumes the run.

const RETRY_MS = 1000, GIVE_UP_MS = 20000;
const RESUMED = "specdemo-run";

let socket = null;
let retry = 0;
let lostAt = null; // first failure since the last frame
let interrupted = false;

function listen(id, from = null) {
  hangUp();
  const root = `${window.gradio_config?.root ?? location.origin}/`;
  const opened = (socket = new WebSocket(new URL(`frames/${id}${from === null ? "" : `?from=${from}`}`, root).href.replace(/^http/, "ws")));
  let delivered = false;
  socket.onmessage = ({ data }) => { delivered = true; take(JSON.parse(data)); };
  socket.onclose = () => { if (opened === socket && busy && (delivered || interrupted)) lose(); };
}

function hangUp() {
  clearTimeout(retry);
  const closing = socket;
  socket = null; // its `onclose` must not reconnect
  closing?.close();
}

function lose() {
  if (!busy || run === null || complete()) return;
  interrupted = true;
  lostAt ??= performance.now();
  if (performance.now() - lostAt > GIVE_UP_MS) return over("failed", "failed: the server is not reachable");
  say("reconnecting", "");
  clearTimeout(retry);
  retry = setTimeout(() => { if (busy) listen(run, received); }, RETRY_MS);
}

async function resume() {
  const id = sessionStorage.getItem(RESUMED);
  sessionStorage.removeItem(RESUMED);
  const text = id && (await server.trace_since([id, 0]).catch(() => null));
  if (!text || busy || run !== null) return;
  press();
  hurried = true;
  take(JSON.parse(text));
}

window.addEventListener("offline", () => { hangUp(); lose(); }, { signal: listeners.signal });
window.addEventListener("pagehide", () => { if (busy && interrupted && run !== null) sessionStorage.setItem(RESUMED, run); }, { signal: listeners.signal });
