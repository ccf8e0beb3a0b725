// Buttons, keyboard shortcuts, file download and upload, and switches stored between visits.

const capturing = { capture: true, signal: listeners.signal };

document.addEventListener("click", (e) => {
  const target = /** @type {Element} */ (e.target);
  if (target.closest("#stop")) return stop();
  if (!target.closest("#run, #repeat")) return;
  if (busy && !displaying()) { e.stopImmediatePropagation(); e.preventDefault(); return; }
  startRun();
}, capturing);

document.addEventListener("keydown", (e) => {
  if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) {
    e.preventDefault();
    e.stopImmediatePropagation(); // a focused checkbox would handle Enter too
    document.getElementById("run").click();
  }
  if (e.key === "Escape" && !(/** @type {Element} */ (e.target).closest?.("[aria-expanded=true]"))) { hideTooltip(); pause(); stop(); } // Escape closes an open dropdown first
}, capturing);

window.addEventListener("specdemo:failed", () => {
  if (busy && run === null) endRun("failed", "failed: the server rejected the run: try again");
  else reconnect();
}, { signal: listeners.signal });

window.addEventListener("resize", drawSpeedCurve, { signal: listeners.signal });

function storedSwitch(id, key, apply) {
  const box = $(id);
  const stored = localStorage.getItem(key);
  if (stored !== null) box.checked = stored === "yes";
  const change = () => { apply(box.checked); localStorage.setItem(key, box.checked ? "yes" : "no"); };
  box.addEventListener("change", change);
  apply(box.checked);
}

storedSwitch("#show-rejected", "specdemo-show-rejected", (on) => $(".cockpit").classList.toggle("only-kept", !on));
storedSwitch("#safe-colours", "specdemo-safe-colours", (on) => $(".cockpit").classList.toggle("safe", on));

function save(text, name, type) {
  if (!text) return setStatus("failed", "the server no longer stores this run: run it again");
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

for (const [name, { lane }] of Object.entries(lanes)) {
  const text = () => [...lane.querySelectorAll(".given, .tok")].filter((span) => !DISCARDED.has(span.dataset.kind)).map((span) => span.textContent).join("");
  $(`#copy-${name}`).addEventListener("click", async (e) => {
    const result = await navigator.clipboard.writeText(text()).then(() => "Copied", () => "Not permitted");
    setText(e.target, result);
    setTimeout(() => setText(e.target, "Copy text"), 1500);
  });
  $(`#trace-${name}`).addEventListener("click", async () => save(await server.trace([run, name]), `specdemo-${name}.jsonl`, "application/x-ndjson"));
  $(`#csv-${name}`).addEventListener("click", async () => save(await server.csv([run, name]), `specdemo-${name}.csv`, "text/csv"));
  $(`#svg-${name}`).addEventListener("click", async () => save(await server.svg([run, name]), `specdemo-${name}.svg`, "image/svg+xml"));
}
$("#save-all").addEventListener("click", async () => save(await server.trace([run, "all"]), "specdemo.jsonl", "application/x-ndjson"));

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
  playback = example;
  skipPacing = false;
  receiveFrame(frame);
  if (!example) return;
  showRecorded(frame.recorded); // now rather than at the end, which would move the lanes
  revealLanes();
}

function revealLanes() { // with the button Run, if the window is high enough
  const [lane, button] = [lanes.spec.lane, document.getElementById("run")].map((part) => part.getBoundingClientRect());
  const behavior = reducedMotion.matches ? "auto" : "smooth";
  const shift = Math.min(lane.bottom - innerHeight, button.top - 8);
  if (lane.top - shift > innerHeight - 150) lanes.spec.lane.scrollIntoView({ block: "nearest", behavior });
  else if (shift > 0) scrollBy({ top: shift, behavior });
}

const EXAMPLE = "nasd, short answer", VISITED_KEY = "specdemo-opened";

$("#play-example").addEventListener("click", () => openTrace(() => server.recorded(EXAMPLE), true));

async function playAtFirstVisit() { // not for links with settings
  const stored = localStorage.getItem(VISITED_KEY) ?? (navigator.webdriver ? "yes" : "play");
  localStorage.setItem(VISITED_KEY, "yes");
  const linked = [...new URLSearchParams(location.search).keys()].some((name) => !name.startsWith("_"));
  if (stored !== "play" || linked || run !== null) return;
  const text = await server.recorded(EXAMPLE).catch(() => null);
  if (text && !JSON.parse(text).refused && run === null && !busy) openTrace(() => text, true);
}

$("#open-trace").addEventListener("click", () => $("#trace-file").click());
$("#trace-file").addEventListener("change", (e) => {
  const [file] = e.target.files;
  e.target.value = ""; // so the same file can be opened again
  if (!file) return;
  if (file.size > MAX_FILE_BYTES) return endRun("failed", `failed: ${file.name} has ${(file.size / 1e6).toFixed(0)} MB: the limit is ${MAX_FILE_BYTES / 1e6} MB`);
  openTrace(async () => server.import_trace(await file.text()));
});
server.recorded("").then((names) => {
  $("#recorded").replaceChildren(...(names ? JSON.parse(names) : []).map(([name, title]) => {
    const button = make("button", { type: "button", class: "small", text: title });
    button.addEventListener("click", () => openTrace(() => server.recorded(name)));
    return button;
  }));
});

if (window.innerWidth < 769) { // gradio's sidebar opens later and would cover a narrow page: close it
  let closedFrames = 0;
  const closeSidebar = () => {
    const handle = /** @type {HTMLElement | null} */ (document.querySelector("#settings.open > button"));
    handle?.click();
    closedFrames = handle || !document.getElementById("settings") ? 0 : closedFrames + 1;
    if (closedFrames < 20 && !listeners.signal.aborted) requestAnimationFrame(closeSidebar);
  };
  closeSidebar();
}

window.windDown?.(); // removes the spinner of the start page
const clock = setInterval(tick, 100);
listeners.signal.addEventListener("abort", () => clearInterval(clock));
markButtons();
$("#use-settings").addEventListener("click", () => {
  window.specdemoRecorded = state.recorded;
  document.getElementById("use-recorded").click();
});
resume().then(playAtFirstVisit);
watch("value", () => { if (props.value) receiveFrame(JSON.parse(props.value)); });
