// The page around the cockpit: buttons, keyboard shortcuts, opened files, recorded runs, and the layout.

import { mountDisplay } from "./display.js";
import { connectDownloads } from "./downloads.js";
import { make } from "./elements.js";
import { pause } from "./replay.js";
import { connectTransport, displayAll, endRun, frameOf, markButtons, receiveFrame, request, resume, run, setStatus, stop } from "./run.js";
import { applyExample, connectForm, exampleNamed, setSettings } from "./settings.js";
import { $, current, isDisplaying, listeners, pageRoot, readStored, store, trigger } from "./state.js";
import { hideTooltip } from "./tooltip.js";

export function mount({ element: root, props, trigger, query }) {
  const lesson = query.get("lesson");
  if (/^[1-5]$/.test(lesson ?? "")) location.replace(`lessons?lesson=${lesson}`);
  mountDisplay({ element: root, trigger });
  connectTransport();
  connectRuns();
  connectDownloads();
  connectTraces(props.max_trace, props.recordings);
  connectLogField();
  connectForm();
  $("#add-run").addEventListener("click", () => trigger("edit")); // keeps the settings as a lane
  $("#use-settings").addEventListener("click", () => setSettings(current.frame.recorded));
  connectLayout(resume().then(() => playAtFirstVisit(query)));
  markButtons();
}

const TURNS = { run: "new", "continue-chat": "next", repeat: "repeat" }; // of the conversation

function connectRuns() {
  const capturing = { capture: true, signal: listeners.signal };

  document.addEventListener("click", (e) => {
    const target = /** @type {Element} */ (e.target);
    if (target.closest("#stop")) return stop();
    const button = target.closest("#run, #continue-chat, #repeat");
    if (button) run(TURNS[button.id]);
    const suggestion = /** @type {HTMLElement | null} */ (target.closest("#suggestion button"));
    if (suggestion) followSuggestion(current.frame.headline.suggestions[suggestion.dataset.suggestion]);
  }, capturing);

  document.addEventListener("focusin", (e) => {
    const field = /** @type {HTMLElement | null} */ (/** @type {Element} */ (e.target).closest("#prompt"));
    if (field) field.dataset.editing = "yes";
  }, capturing);

  document.addEventListener("keydown", (e) => {
    if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) {
      e.preventDefault();
      e.stopImmediatePropagation(); // a focused checkbox would handle Enter too
      run("new");
    }
    if (e.key === "Escape" && !(/** @type {Element} */ (e.target).closest?.("[aria-expanded=true]"))) { hideTooltip(); pause(); stop(); } // Escape closes an open dropdown first
  }, capturing);
}

function followSuggestion({ press, example, set }) {
  if (press) run(press);
  if (example) applyExample(exampleNamed(example));
  if (set) setSettings(set);
}

function connectLogField() { // a dropped or opened file replaces the text of the field
  const capturing = { capture: true, signal: listeners.signal };
  const logField = (e) => /** @type {Element} */ (e.target).closest("#engine-log textarea");
  const show = async (file) => {
    const field = /** @type {HTMLTextAreaElement} */ (document.querySelector("#engine-log textarea"));
    field.value = await file.text();
    field.dispatchEvent(new Event("input", { bubbles: true }));
  };
  document.addEventListener("dragover", (e) => { if (logField(e)) e.preventDefault(); }, capturing);
  document.addEventListener("drop", (e) => {
    const [file] = e.dataTransfer?.files ?? [];
    if (!logField(e) || !file) return;
    e.preventDefault();
    show(file);
  }, capturing);
  document.addEventListener("click", (e) => {
    if (!(/** @type {Element} */ (e.target).closest("#engine-open"))) return;
    const input = make("input", { type: "file" });
    input.addEventListener("change", () => show(input.files[0]));
    input.click();
  }, capturing);
}

// --- recorded runs: traces of files, the bundled traces, and the example of the first visit --------------------------

const EXAMPLE = "hybrid, short answer", VISITED_KEY = "specdemo-opened";

function connectTraces(maxBytes, recordings) { // same limit as on the server
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

async function playAtFirstVisit(query) { // not for links with settings
  const visited = readStored(VISITED_KEY) === "yes";
  store(VISITED_KEY, "yes");
  const linked = [...query.keys()].some((name) => !name.startsWith("_"));
  if (visited || linked || current.run !== null) return;
  const frame = await recording(EXAMPLE);
  if (frame && !frame.refused && current.run === null && !current.busy) await openTrace(() => frame, true);
}

// --- layout: the sidebar of the settings, and the moment at which the mounted page becomes visible -------------------

const REVEAL_FRAMES = 3, REVEAL_TIMEOUT_MS = 4000, CONTENT_TIMEOUT_MS = 1500;
const narrow = matchMedia("(max-width: 768px)");

function connectLayout(content) { // `content`: promise of the first run
  if (narrow.matches) fitSidebar();
  narrow.addEventListener("change", fitSidebar, { signal: listeners.signal });
  Promise.race([content, new Promise((resolve) => setTimeout(resolve, CONTENT_TIMEOUT_MS))]).finally(reveal); // a slow server does not hide the page
}

function fitSidebar() { // it would cover a narrow page, and a wide one has no button to open it
  trigger(narrow.matches ? "collapse" : "expand");
}

function reveal() { // when all parts are mounted and have their size
  const began = performance.now();
  let height = 0, stable = 0;
  const check = () => {
    const mounted = ["settings", "examples", "prompt", "run", "tabs"].every((id) => document.getElementById(id)) && "settings" in document.body.dataset && !current.drawing && !(narrow.matches && document.querySelector("#settings.open"));
    const now = document.documentElement.scrollHeight;
    stable = mounted && now === height ? stable + 1 : 0;
    height = now;
    if (stable >= REVEAL_FRAMES || performance.now() - began > REVEAL_TIMEOUT_MS) {
      document.body.dataset.shown = "yes";
      observeContents();
      markButtons(); // a resumed run began before they were mounted
    } else setTimeout(check, 16); // hidden tabs receive no animation frames
  };
  check();
}

// Attributes that parts of Gradio lack, for keyboards and screen readers.

const SCROLLABLE = ":is(#tabs, #estimate, #fit) .md table";

function completeAttributes() {
  for (const part of document.querySelectorAll(SCROLLABLE)) {
    if (part.scrollWidth > part.clientWidth) part.setAttribute("tabindex", "0");
    else part.removeAttribute("tabindex");
  }
  for (const head of document.querySelectorAll("#tabs .virtual-table-viewport th:first-child")) head.setAttribute("tabindex", "0");
  for (const empty of document.querySelectorAll("#tabs .empty[aria-label]")) empty.setAttribute("role", "note");
  for (const icon of document.querySelectorAll("footer img")) icon.setAttribute("alt", "");
}

function completeMessages() { // a button must not contain a button: messages have one that closes them
  for (const head of document.querySelectorAll(".toast-header[role]")) {
    head.removeAttribute("role");
    head.removeAttribute("tabindex");
  }
}

function observeContents() {
  const contents = new ResizeObserver(completeAttributes), messages = new MutationObserver(completeMessages);
  listeners.signal.addEventListener("abort", () => { contents.disconnect(); messages.disconnect(); });
  for (const part of document.querySelectorAll("#tabs, #estimate, #fit")) contents.observe(part);
  for (const part of document.querySelectorAll(".toast-wrap")) messages.observe(part, { childList: true, subtree: true });
  completeMessages();
  completeAttributes();
}
