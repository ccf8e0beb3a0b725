// The display of runs, shared by the page and saved web pages.

import { connectGuesses } from "./guesses.js";
import { connectInspector } from "./inspector.js";
import { createLanes } from "./lanes.js";
import { connectPace } from "./pace.js";
import { connectPlotExport } from "./plot_export.js";
import { connectReplay } from "./replay.js";
import { attach } from "./state.js";
import { connectSwitches } from "./switches.js";
import { connectTooltip } from "./tooltip.js";
import { connectWalkthrough } from "./walkthrough.js";

export function mountDisplay(component) { // Gradio may mount the component again
  attach(component);
  createLanes();
  connectGuesses();
  connectPace();
  connectTooltip();
  connectReplay();
  connectWalkthrough();
  connectInspector();
  connectPlotExport();
  connectSwitches();
}
