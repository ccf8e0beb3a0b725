// Recorded runs: traces of files, the bundled traces, and the example of the first visit.

import { make } from "./elements.js";
import { displayAll, pause } from "./replay.js";
import { endRun, receiveFrame, setStatus } from "./run.js";
import { $, current, displaying, pageRoot, server } from "./state.js";

const EXAMPLE = "hybrid, short answer", VISITED_KEY = "specdemo-opened";

export function connectTraces(maxBytes) { // same limit as on the server
  $("#play-example").addEventListener("click", () => openTrace(() => server.recorded(EXAMPLE), true));
  $("#open-trace").addEventListener("click", () => $("#trace-file").click());
  $("#trace-file").addEventListener("change", (e) => {
    const [file] = e.target.files;
    e.target.value = ""; // so the same file can be opened again
    if (!file) return;
    if (file.size > maxBytes) return endRun("failed", `failed: ${file.name} has ${(file.size / 1e6).toFixed(0)} MB: the limit is ${maxBytes / 1e6} MB`);
    openTrace(() => sendTrace(file));
  });
  server.recorded("").then((names) => {
    $("#recorded").replaceChildren(...(names ? JSON.parse(names) : []).map(([name, title]) => {
      const button = make("button", { type: "button", class: "small", text: title });
      button.addEventListener("click", () => openTrace(() => server.recorded(name)));
      return button;
    }));
  });
}

async function openTrace(load, example = false) {
  if (displaying()) displayAll();
  if (current.busy) return setStatus("failed", "a run is in progress: stop it, then open the trace");
  const { started } = current;
  let text;
  try {
    text = await load();
  } catch {
    return endRun("failed", "failed: the file is not a text file");
  }
  if (typeof text !== "string") return endRun("failed", "failed: the server is not reachable");
  const frame = JSON.parse(text);
  if (current.busy || current.started !== started) return; // Run was pressed meanwhile
  if (frame.refused) return endRun("failed", `failed: ${frame.refused}`);
  pause();
  receiveFrame(frame);
  current.walking = example;
}

async function sendTrace(file) {
  const headers = { "Content-Type": "application/x-ndjson" };
  const response = await fetch(new URL("traces", pageRoot()), { method: "POST", headers, body: file }).catch(() => null);
  if (response === null || response.ok) return response && response.text();
  const { detail } = await response.json().catch(() => ({}));
  return detail ? JSON.stringify({ refused: detail }) : null;
}

export async function playAtFirstVisit(query) { // not for links with settings
  const visited = localStorage.getItem(VISITED_KEY) === "yes";
  localStorage.setItem(VISITED_KEY, "yes");
  const linked = [...query.keys()].some((name) => !name.startsWith("_"));
  if (!visited && !linked && current.run === null && !current.busy) await openTrace(() => server.recorded(EXAMPLE), true);
}
