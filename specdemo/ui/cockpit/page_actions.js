// Buttons, keyboard shortcuts, file download and upload, and switches stored between visits.

const lesson = new URLSearchParams(location.search).get("lesson");
if (/^[1-5]$/.test(lesson ?? "")) location.replace(`lessons?lesson=${lesson}`);

const capturing = { capture: true, signal: listeners.signal };

document.addEventListener("click", (e) => {
  const target = /** @type {Element} */ (e.target);
  if (target.closest("#stop")) return stop();
  if (!target.closest("#run, #continue-chat, #repeat")) return;
  if (busy && !displaying()) { e.stopImmediatePropagation(); e.preventDefault(); return; }
  startRun(newRunId());
}, capturing);

document.addEventListener("focusin", (e) => {
  const field = /** @type {HTMLElement | null} */ (/** @type {Element} */ (e.target).closest("#prompt"));
  if (field) field.dataset.editing = "yes";
}, capturing);

document.addEventListener("keydown", (e) => {
  if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) {
    e.preventDefault();
    e.stopImmediatePropagation(); // a focused checkbox would handle Enter too
    document.getElementById("run").click();
  }
  if (e.key === "Escape" && !(/** @type {Element} */ (e.target).closest?.("[aria-expanded=true]"))) { hideTooltip(); pause(); stop(); } // Escape closes an open dropdown first
}, capturing);

window.addEventListener("specdemo:failed", async () => {
  if (!busy || run !== null) return reconnect();
  const id = started, frame = await server.trace_since([id, 0]);
  if (!busy || id !== started || run !== null) return;
  if (frame) receiveFrame(JSON.parse(frame)); // only the answer was lost
  else endRun("failed", "failed: the server rejected the run: try again");
}, { signal: listeners.signal });

window.addEventListener("resize", drawSpeedCurve, { signal: listeners.signal });

function save(text, name, type) {
  if (!text) return showMissing(text);
  download(text, name, type);
}

for (const [name, { lane }] of Object.entries(lanes)) {
  const text = () => [...lane.querySelectorAll(".given, .tok")].filter((span) => !DISCARDED.has(span.dataset.kind)).map((span) => span.textContent).join("");
  $(`#copy-${name}`).addEventListener("click", async (e) => {
    const result = await (navigator.clipboard?.writeText(text()) ?? Promise.reject()).then(() => "Copied", () => "Not permitted");
    setText(e.target, result);
    setTimeout(() => setText(e.target, "Copy text"), 1500);
  });
  $(`#trace-${name}`).addEventListener("click", async () => save(await server.trace([run, name]), `specdemo-${name}.jsonl`, "application/x-ndjson"));
  $(`#csv-${name}`).addEventListener("click", async () => save(await server.csv([run, name]), `specdemo-${name}.csv`, "text/csv"));
  $(`#svg-${name}`).addEventListener("click", async () => save(await server.svg([run, name]), `specdemo-${name}.svg`, "image/svg+xml"));
}
$("#save-all").addEventListener("click", async () => save(await server.trace([run, "all"]), "specdemo.jsonl", "application/x-ndjson"));
$("#save-page").addEventListener("click", async () => save(await server.web_page(run), "specdemo.html", "text/html"));

const MAX_FILE_BYTES = props.max_trace; // same limit as on the server

async function openTrace(load, example = false) {
  if (displaying()) displayAll();
  if (busy) return setStatus("failed", "a run is in progress: stop it, then open the trace");
  let text;
  try {
    text = await load();
  } catch {
    return endRun("failed", "failed: the file is not a text file");
  }
  if (typeof text !== "string") return endRun("failed", "failed: the server is not reachable");
  const frame = JSON.parse(text);
  if (busy) return; // Run was pressed meanwhile
  if (frame.refused) return endRun("failed", `failed: ${frame.refused}`);
  pause();
  receiveFrame(frame);
  walking = example;
}

async function sendTrace(file) {
  const headers = { "Content-Type": "application/x-ndjson" };
  const response = await fetch(new URL("traces", pageRoot()), { method: "POST", headers, body: file }).catch(() => null);
  if (response === null || response.ok) return response && response.text();
  const { detail } = await response.json().catch(() => ({}));
  return detail ? JSON.stringify({ refused: detail }) : null;
}

const EXAMPLE = "hybrid, short answer", VISITED_KEY = "specdemo-opened";

$("#play-example").addEventListener("click", () => openTrace(() => server.recorded(EXAMPLE), true));

async function playAtFirstVisit() { // not for links with settings
  const visited = localStorage.getItem(VISITED_KEY) === "yes";
  localStorage.setItem(VISITED_KEY, "yes");
  const linked = [...new URLSearchParams(location.search).keys()].some((name) => !name.startsWith("_"));
  if (visited || linked || run !== null) return;
  const text = await server.recorded(EXAMPLE).catch(() => null);
  if (text && !JSON.parse(text).refused && run === null && !busy) await openTrace(() => text, true);
}

$("#open-trace").addEventListener("click", () => $("#trace-file").click());
$("#trace-file").addEventListener("change", (e) => {
  const [file] = e.target.files;
  e.target.value = ""; // so the same file can be opened again
  if (!file) return;
  if (file.size > MAX_FILE_BYTES) return endRun("failed", `failed: ${file.name} has ${(file.size / 1e6).toFixed(0)} MB: the limit is ${MAX_FILE_BYTES / 1e6} MB`);
  openTrace(() => sendTrace(file));
});
server.recorded("").then((names) => {
  $("#recorded").replaceChildren(...(names ? JSON.parse(names) : []).map(([name, title]) => {
    const button = make("button", { type: "button", class: "small", text: title });
    button.addEventListener("click", () => openTrace(() => server.recorded(name)));
    return button;
  }));
});

const logField = (e) => /** @type {HTMLTextAreaElement | null} */ (/** @type {Element} */ (e.target).closest("#engine-log textarea"));

document.addEventListener("dragover", (e) => { if (logField(e)) e.preventDefault(); }, capturing);
document.addEventListener("drop", async (e) => { // a file replaces the text of the field
  const field = logField(e), [file] = e.dataTransfer?.files ?? [];
  if (!field || !file) return;
  e.preventDefault();
  field.value = await file.text();
  field.dispatchEvent(new Event("input", { bubbles: true }));
}, capturing);

const narrow = matchMedia("(max-width: 768px)");

function fitSidebar() { // it would cover a narrow page, and a wide one has no button to open it; gradio opens it late
  let settledFrames = 0;
  const fit = () => {
    const handle = /** @type {HTMLElement | null} */ (document.querySelector(`#settings${narrow.matches ? ".open" : ":not(.open)"} > button`));
    handle?.click();
    settledFrames = handle || !document.getElementById("settings") ? 0 : settledFrames + 1;
    if (settledFrames < 20 && !listeners.signal.aborted) requestAnimationFrame(fit);
  };
  fit();
}

if (narrow.matches) fitSidebar();
narrow.addEventListener("change", fitSidebar, { signal: listeners.signal });

markButtons();
$("#add-run").addEventListener("click", () => document.getElementById("keep-lane").click());
$("#use-settings").addEventListener("click", () => {
  window.specdemoRecorded = state.recorded;
  document.getElementById("use-recorded").click();
});

const tabs = (window.specdemoTabs = new BroadcastChannel("specdemo-lanes")); // added settings are the same in all tabs
tabs.onmessage = ({ data }) => {
  window.specdemoLanes = JSON.parse(data);
  document.getElementById("lanes-of-tab").click();
};
listeners.signal.addEventListener("abort", () => tabs.close());

const REVEAL_FRAMES = 3, REVEAL_TIMEOUT_MS = 4000, CONTENT_TIMEOUT_MS = 1500;

function reveal() { // when all parts are mounted and have their size
  const began = performance.now();
  let height = 0, stable = 0;
  const check = () => {
    const more = /** @type {HTMLElement | null} */ (document.querySelector("#more-settings button.open"));
    if (more && document.getElementById("max-tokens")) more.click(); // its parts remain in the document
    const mounted = !more && ["settings", "examples", "prompt", "run", "tabs"].every((id) => document.getElementById(id)) && "settings" in document.body.dataset && !drawing && !(narrow.matches && document.querySelector("#settings.open"));
    const now = document.documentElement.scrollHeight;
    stable = mounted && now === height ? stable + 1 : 0;
    height = now;
    if (stable >= REVEAL_FRAMES || performance.now() - began > REVEAL_TIMEOUT_MS) { document.body.dataset.shown = "yes"; observeContents(); }
    else setTimeout(check, 16); // hidden tabs receive no animation frames
  };
  check();
}

const content = resume().then(playAtFirstVisit);
Promise.race([content, new Promise((resolve) => setTimeout(resolve, CONTENT_TIMEOUT_MS))]).finally(reveal); // a slow server does not hide the page
watch("value", () => { if (props.value) receiveFrame(JSON.parse(props.value)); });
