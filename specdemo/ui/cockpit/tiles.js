// Tiles and rates of the lanes, updated less often than the tokens.

import { setText } from "./elements.js";
import { showPosition } from "./headline.js";
import { showClock } from "./run.js";
import { $, current, lanes } from "./state.js";

export const TILES_INTERVAL_MS = 250;

let tilesDrawnAt = 0;

export function tilesAge() { return performance.now() - tilesDrawnAt; } // in milliseconds

export function drawTiles() {
  tilesDrawnAt = performance.now();
  showPosition();
  showRates();
  showClock();
}

export function showRates() {
  for (const [name, rate] of Object.entries(current.frame.rates)) setText($(".rate", lanes[name].box), rate);
}
