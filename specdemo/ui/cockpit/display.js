// The display of runs, shared by the page and saved web pages, and its switches, stored between visits.

import { connectPlotExport } from "./downloads.js";
import { setText } from "./elements.js";
import { connectInspector } from "./inspector.js";
import { createLanes, placeAllGuesses } from "./lanes.js";
import { connectPace } from "./pace.js";
import { connectReplay } from "./replay.js";
import { connectTimeline } from "./result.js";
import { displayAll } from "./run.js";
import { $, attach, readStored, store } from "./state.js";
import { connectTooltip } from "./tooltip.js";

export function mountDisplay(component) { // Gradio may mount the component again
  attach(component);
  createLanes();
  connectPace();
  connectTooltip();
  connectReplay();
  connectInspector();
  connectTimeline();
  connectPlotExport();
  connectSwitches();
  $("#show-rest").addEventListener("click", displayAll);
}

const COLOUR_WORDS = { accepted: ["green", "blue"], rejected: ["red", "orange"], correction: ["blue", "yellow"], bonus: ["pale blue", "pale yellow"] };

function storedSwitch(id, key, apply) {
  const box = $(id);
  const stored = readStored(key);
  if (stored !== null) box.checked = stored === "yes";
  const change = () => { apply(box.checked); placeAllGuesses(); store(key, box.checked ? "yes" : "no"); };
  box.addEventListener("change", change);
  apply(box.checked);
}

function connectSwitches() {
  storedSwitch("#show-rejected", "specdemo-show-rejected", (on) => $(".cockpit").classList.toggle("only-kept", !on));
  storedSwitch("#inline-guesses", "specdemo-inline-guesses", (on) => $(".cockpit").classList.toggle("inline", on));
  storedSwitch("#safe-colours", "specdemo-safe-colours", (on) => {
    $(".cockpit").classList.toggle("safe", on);
    for (const [kind, words] of Object.entries(COLOUR_WORDS)) setText($(`[data-legend=${kind}]`), words[Number(on)]);
  });
}
