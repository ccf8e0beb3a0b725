// The cockpit in the page: buttons, keyboard shortcuts, downloads.

import { mountDisplay } from "./display.js";
import { make, setText } from "./elements.js";
import { shownResult } from "./headline.js";
import { connectLayout } from "./layout.js";
import { savedPage } from "./page_export.js";
import { download, savePng } from "./plot_export.js";
import { pause } from "./replay.js";
import { markButtons, showMissing, stop } from "./run.js";
import { $, current, DISCARDED, lanes, listeners, trigger } from "./state.js";
import { connectForm, setSettings } from "./settings.js";
import { asCsv } from "./step_table.js";
import { textPicture } from "./text_picture.js";
import { hideTooltip } from "./tooltip.js";
import { connectTraces, playAtFirstVisit } from "./traces.js";
import { connectTransport, resume, run, savedTrace } from "./transport.js";

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
  connectSettings();
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
    if (!button) return;
    run(TURNS[button.id]);
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

function save(text, name, type) {
  if (!text) return showMissing(text);
  download(text, name, type);
}

function connectDownloads() {
  for (const [name, { lane }] of Object.entries(lanes)) {
    const text = () => [...lane.querySelectorAll(".given, .tok")].filter((span) => !DISCARDED.has(span.dataset.kind)).map((span) => span.textContent).join("");
    $(`#copy-${name}`).addEventListener("click", async (e) => {
      const result = await (navigator.clipboard?.writeText(text()) ?? Promise.reject()).then(() => "Copied", () => "Not permitted");
      setText(e.target, result);
      setTimeout(() => setText(e.target, "Copy text"), 1500);
    });
    $(`#trace-${name}`).addEventListener("click", async () => save(await savedTrace(name), `specdemo-${name}.jsonl`, "application/x-ndjson"));
    $(`#csv-${name}`).addEventListener("click", () => download(asCsv(lanes[name]), `specdemo-${name}.csv`, "text/csv"));
    const picture = () => textPicture(lanes[name], current.frame.figures[name].metrics, current.frame.rates[name], shownResult());
    $(`#svg-${name}`).addEventListener("click", () => download(picture(), `specdemo-${name}.svg`, "image/svg+xml"));
    $(`#png-${name}`).addEventListener("click", () => savePng(picture(), `specdemo-${name}.png`));
  }
  $("#save-all").addEventListener("click", async () => save(await savedTrace("all"), "specdemo.jsonl", "application/x-ndjson"));
  $("#save-page").addEventListener("click", async () => save(await savedPage(), "specdemo.html", "text/html"));
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

function connectSettings() {
  $("#add-run").addEventListener("click", () => trigger("edit")); // keeps the settings as a lane
  $("#use-settings").addEventListener("click", () => setSettings(current.frame.recorded));
}
