// Replay of all lanes on one clock from the recorded times. Steps after the current time are hidden.

import { seconds } from "./blocks.js";
import { setText } from "./elements.js";
import { showHeadline, showPosition } from "./headline.js";
import { slowRate } from "./pace.js";
import { draw } from "./run.js";
import { $, isComplete, current, element, lanes, reducedMotion } from "./state.js";
import { showRates } from "./tiles.js";
import { closeTimeline, openTimeline } from "./timeline.js";
import { hideTooltip } from "./tooltip.js";
import { endWalk, pauseWalk } from "./walkthrough.js";

export const replayClock = { lanes: [], end: 0, at: 0, playing: false, frame: 0, timer: 0, before: 0, rate: 1 };

export function openReplay(names) {
  replayClock.lanes = names;
  replayClock.end = Math.max(...names.map((name) => lanes[name].steps.at(-1).t));
  replayClock.at = replayClock.end;
  $("#timeline").style.setProperty("--at", "1");
  const slider = $("#race-at");
  slider.max = replayClock.end;
  slider.value = replayClock.end;
  setText($("#race-play"), names.length > 1 ? "▶ Race" : "▶ Replay");
  setText($("#race-clock"), seconds(replayClock.end));
  $("#race").hidden = false;
  for (const note of element.querySelectorAll("#race p")) note.hidden = names.length < 2 || !note.textContent;
  openTimeline(names);
}

export function closeReplay() {
  pause();
  replayClock.lanes = [];
  $("#race").hidden = true;
  closeTimeline();
}

export function seek(t) {
  replayClock.at = Math.max(0, Math.min(t, replayClock.end));
  for (const name of replayClock.lanes) {
    const replayed = lanes[name];
    const upTo = replayed.steps.findLastIndex((step) => step.t <= replayClock.at) + 1;
    for (let i = replayed.shown; i < upTo; i++) replayed.steps[i].span.hidden = false;
    for (let i = upTo; i < replayed.shown; i++) replayed.steps[i].span.hidden = true;
    if (replayed.shown !== upTo) {
      replayed.shown = upTo;
      scrollLane(replayed.lane, replayed.steps[upTo - 1]?.span);
    }
    const last = replayed.steps[upTo - 1];
    const finished = upTo === replayed.steps.length;
    setText($(".rate", replayed.box), finished ? current.frame.rates[name] : `${last?.tokens ?? 0} tokens`);
  }
  if (replayClock.at === replayClock.end) { showRates(); if (isComplete()) showHeadline(); }
  showPosition();
  showPart();
  $("#timeline").style.setProperty("--at", String(replayClock.at / replayClock.end));
  $("#race-at").value = replayClock.at;
  setText($("#race-clock"), seconds(replayClock.at));
  hideTooltip();
}

function showReplayStatus() { // the run is done, although only a part of it may be visible
  if (current.busy || !isComplete() || current.pending.length) return;
  setText($("#status"), [current.frame.phase.filter(Boolean).join(": "), replayClock.playing && "replaying"].filter(Boolean).join(", "));
}

export function showPart() { // counts of the displayed tokens and the button that displays the rest, while a part is hidden
  const drawn = current.run === null ? [] : Object.values(lanes).filter((lane) => lane.last);
  const shown = drawn.map((lane) => lane.steps[lane.shown - 1]?.tokens ?? 0), all = drawn.map((lane) => lane.last.tokens);
  const partial = shown.some((count, i) => count < all[i]);
  const equal = new Set(all).size === 1;
  const counts = equal ? `${joined(shown)} of ${all[0]}` : joined(shown.map((count, i) => `${count} of ${all[i]}`));
  setText($("#shown"), partial ? `${counts} shown` : "");
  $(".cockpit").classList.toggle("partial", partial);
  $("#show-rest").hidden = !partial;
}

function joined(words) { return words.length < 2 ? words.join() : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`; }

export function displayAll() {
  endWalk();
  current.frozen = false;
  if (isComplete() && !current.pending.length) { // hidden by the replay
    seek(replayClock.end);
    return pause();
  }
  current.skipPacing = current.drawing = true;
  draw();
}

export function scrollLane(lane, span) { // scroll the lane without scrolling the page
  if (!span) { lane.scrollTop = 0; return; }
  const [box, target] = [lane.getBoundingClientRect(), span.getBoundingClientRect()];
  if (target.bottom > box.bottom) lane.scrollTop += target.bottom - box.bottom + 8;
  else if (target.top < box.top) lane.scrollTop += target.top - box.top - 8;
}

export function play(rate = Number($("#race-speed").value)) {
  if (replayClock.at >= replayClock.end) seek(0);
  replayClock.playing = true;
  replayClock.rate = rate;
  replayClock.before = performance.now();
  setText($("#race-play"), "❚❚ Pause");
  showReplayStatus();
  // with reduced motion, update four times per second
  const next = (step) => (reducedMotion.matches ? (replayClock.timer = setTimeout(step, 250)) : (replayClock.frame = requestAnimationFrame(step)));
  const step = () => {
    const now = performance.now();
    seek(replayClock.at + ((now - replayClock.before) / 1000) * replayClock.rate);
    replayClock.before = now;
    replayClock.at < replayClock.end ? next(step) : pause();
  };
  next(step);
}

export function pause() {
  replayClock.playing = false;
  cancelAnimationFrame(replayClock.frame);
  clearTimeout(replayClock.timer);
  if (isComplete() && !current.pending.length) showHeadline();
  showReplayStatus();
  setText($("#race-play"), replayClock.lanes.length > 1 ? "▶ Race" : "▶ Replay");
}

export function raceOnce() { // after a comparison, unless another pace was chosen
  const wanted = $("#pace").value === "replay" && replayClock.lanes.length > 1 && current.frame.phase[0] === "done" && !current.frame.disturbed.length;
  if (!wanted || reducedMotion.matches || document.visibilityState === "hidden") return false;
  setText($("#headline"), "Race: both runs in real time …");
  play(1);
  return true;
}

export function connectReplay() {
  $("#show-rest").addEventListener("click", displayAll);
  $("#race-play").addEventListener("click", () => { pauseWalk(); replayClock.playing ? pause() : play(); });
  $("#slow-motion").addEventListener("click", () => { pause(); endWalk(); if (replayClock.at >= replayClock.end) seek(0); play(slowRate()); });
  $("#race-speed").addEventListener("change", (e) => { replayClock.rate = Number(e.target.value); });
  $("#race-at").addEventListener("input", (e) => { pause(); pauseWalk(); seek(Number(e.target.value)); });
}
