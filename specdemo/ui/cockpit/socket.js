// Frames of a run over a WebSocket, which costs the decoding thread less than gradio events (the fallback).
// After an interruption of the network the page reconnects; when Gradio reloads it, the page resumes the run.

const RETRY_MS = 1000, GIVE_UP_MS = 20000; // the server stops a run that nobody receives for 20 s
const RESUMED = "specdemo-run"; // id of an interrupted run, for the reloaded page

let socket = null;
let retry = 0;
let lostAt = null; // time of the first failure since the last frame
let interrupted = false; // during the current run

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
  socket = null; // first, so that its `onclose` does not reconnect
  closing?.close();
}

function lose() { // the connection is interrupted: retry until the server has given up the run
  if (!busy || run === null) return;
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
  take(JSON.parse(text));
}

window.addEventListener("offline", () => { hangUp(); lose(); }, { signal: listeners.signal });
window.addEventListener("pagehide", () => { if (busy && interrupted && run !== null) sessionStorage.setItem(RESUMED, run); }, { signal: listeners.signal });
