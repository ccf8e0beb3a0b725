// Recorded runs: traces of files, the bundled traces, and the example of the first visit.

import { make } from "./elements.js";
import { displayAll, pause } from "./replay.js";
import { endRun, receiveFrame, setStatus } from "./run.js";
import { $, current, isDisplaying, pageRoot } from "./state.js";
import { readStored, store } from "./storage.js";
import { frameOf, request } from "./transport.js";

const EXAMPLE = "hybrid, short answer", VISITED_KEY = "specdemo-opened";

export function connectTraces(maxBytes, recordings) { // same limit as on the server
  $("#play-example").addEventListener("click", () => openTrace(() => recording(EXAMPLE), true));
  $("#open-trace").addEventListener("click", () => $("#trace-file").click());
  $("#trace-file").addEventListener("change", (e) => {
    const [file] = e.target.files;
    e.target.value = ""; // so the same file can be opened again
    if (!file) return;
    const refused = `${file.name} has ${(file.size / 1e6).toFixed(0)} MB: the limit is ${maxBytes / 1e6} MB`;
    openTrace(() => (file.size > maxBytes ? { refused } : sendTrace(file)));
  });
  $("#recorded").replaceChildren(...recordings.map((name) => {
    const button = make("button", { type: "button", class: "small", text: name.replaceAll("-", " ") });
    button.addEventListener("click", () => openTrace(() => recording(name)));
    return button;
  }));
}

async function recording(name) { return frameOf(await request("recordings", { name })); }

async function openTrace(load, example = false) {
  if (isDisplaying()) displayAll();
  if (current.busy) return setStatus("failed", "a run is in progress: stop it, then open the trace");
  const { started } = current;
  const frame = await load();
  if (current.busy || current.started !== started) return; // Run was pressed meanwhile
  if (!frame) return endRun("failed", "failed: the server is not reachable");
  if (frame.refused) return endRun("failed", `failed: ${frame.refused}`);
  pause();
  receiveFrame(frame);
  current.walking = example;
}

async function sendTrace(file) {
  const headers = { "Content-Type": "application/x-ndjson" };
  const response = await fetch(new URL("traces", pageRoot()), { method: "POST", headers, body: file }).catch(() => null);
  if (response === null || response.ok) return frameOf(response);
  const { detail } = await response.json().catch(() => ({}));
  return detail ? { refused: detail } : null;
}

export async function playAtFirstVisit(query) { // not for links with settings
  const visited = readStored(VISITED_KEY) === "yes";
  store(VISITED_KEY, "yes");
  const linked = [...query.keys()].some((name) => !name.startsWith("_"));
  if (visited || linked || current.run !== null) return;
  const frame = await recording(EXAMPLE);
  if (frame && !frame.refused && current.run === null && !current.busy) await openTrace(() => frame, true);
}
