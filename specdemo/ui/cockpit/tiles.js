// Tiles, rates of the lanes and the speed curve, updated less often than the tokens.

import { setText } from "./elements.js";
import { showPosition } from "./headline.js";
import { showClock } from "./run.js";
import { $, current, element, lanes } from "./state.js";

export const TILES_INTERVAL_MS = 250;

let tilesDrawnAt = 0;

export function tilesAge() { return performance.now() - tilesDrawnAt; } // in milliseconds

export function drawTiles() {
  tilesDrawnAt = performance.now();
  showPosition();
  showRates();
  showClock();
  drawSpeedCurve(); // last, because it forces a layout
}

export function showRates() {
  for (const [name, rate] of Object.entries(current.frame.rates)) setText($(".rate", lanes[name].box), rate);
}

export function drawSpeedCurve() {
  const canvas = $(".spark");
  const [width, height, scale] = [canvas.clientWidth, canvas.clientHeight, window.devicePixelRatio || 1];
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const curves = Object.entries(lanes).map(([name, lane]) => ({ name, points: speeds(lane.steps) })).filter(({ points }) => points.length > 1);
  if (!curves.length) return;
  const top = Math.max(...curves.flatMap(({ points }) => points.map(([, y]) => y))) * 1.1;
  const end = Math.max(...curves.map(({ points }) => points.at(-1)[0]));
  const style = getComputedStyle(element);
  for (const { name, points } of curves) {
    const first = name === "spec" || curves.length === 1;
    pen.beginPath();
    for (const [x, y] of points) pen.lineTo((x / end) * (width - 2) + 1, height - 1 - (y / top) * (height - 3));
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    pen.setLineDash(first ? [] : { ar: [3, 3], third: [7, 3], fourth: [1, 3] }[name]);
    pen.strokeStyle = style.getPropertyValue(first ? "--ink" : "--quiet");
    pen.stroke();
  }
}

function speeds(steps) { // [time, tokens per second] over a window of eight steps, without the prefill
  const points = [];
  const stride = Math.max(1, Math.floor(steps.length / 200)); // at most 200 points
  for (let i = 4; i < steps.length; i += stride) {
    const [before, now] = [steps[Math.max(0, i - Math.max(8, stride))], steps[i]];
    if (now.t > before.t) points.push([now.t - steps[0].t, (now.tokens - before.tokens) / (now.t - before.t)]);
  }
  return points;
}
