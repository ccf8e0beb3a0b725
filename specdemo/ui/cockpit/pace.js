// Pace of the display. Lanes appear as generated; when a comparison is done, it is replayed once in real time.
// Readable pace (slow motion): the browser displays PACE tokens/s of the fastest lane, the others in proportion.

import { $, isComplete, current, lanes, readStored, reducedMotion, store } from "./state.js";

export const PACE = 15;
const START_TIMEOUT_MS = 5000; // lanes of a comparison start together, at the latest this long after the first step
const PACE_KEY = "specdemo-pace";

let pacedAt = 0; // time of the last display
let firstStepAt = 0;

export function resetPace() { firstStepAt = 0; }

export function isPaced() {
  const aborted = isComplete() && current.frame.phase[0] !== "done";
  const wanted = current.busy && !current.skipPacing && !aborted && $("#pace").value === "readable";
  return wanted && document.visibilityState !== "hidden" && !reducedMotion.matches;
}

export function updateSpeeds(records) { // speed of the received steps, without the prefill
  for (const { l, step } of records) {
    if (!step) continue;
    const lane = lanes[l];
    firstStepAt ||= performance.now();
    lane.last = { t: step.t, tokens: (lane.last?.tokens ?? 0) + step.tokens.length };
    lane.first ??= lane.last;
  }
}

function measuredSpeed({ first, last }) { return last?.t > first?.t ? (last.tokens - first.tokens) / (last.t - first.t) : 0; }

function fastestSpeed() { return Math.max(...current.frame.plan.map((name) => measuredSpeed(lanes[name]))); }

/** Seconds of the recorded clock per second of the display. */
export function slowRate() { return Math.min(1, PACE / fastestSpeed()); }

export function removeDueRecords() { // remove the records to be displayed now from `pending`
  if (current.frozen) return [];
  const now = performance.now(), seconds = (now - pacedAt) / 1000;
  pacedAt = now;
  if (!isPaced()) return current.pending.splice(0);
  const fastest = fastestSpeed();
  const delayed = current.frame.plan.length > 1 && !current.frame.over && fastest > PACE && now - firstStepAt < START_TIMEOUT_MS;
  for (const lane of Object.values(lanes)) { // time without steps is not made up for
    if (lane.behind && !delayed) lane.credit += seconds * PACE * (measuredSpeed(lane) / fastest || 1);
    lane.behind = false;
  }
  const [due, later] = [[], []];
  for (const record of current.pending) {
    const lane = lanes[record.l];
    lane.behind ||= Boolean(record.step) && lane.credit < 0;
    if (record.step && !lane.behind) lane.credit -= record.step.tokens.length;
    (lane.behind ? later : due).push(record);
  }
  current.pending = later;
  return due;
}

export function connectPace() {
  const storedPace = readStored(PACE_KEY);
  if (["replay", "readable", "instant"].includes(storedPace)) $("#pace").value = storedPace;
  $("#pace").addEventListener("change", (e) => store(PACE_KEY, e.target.value));
}
