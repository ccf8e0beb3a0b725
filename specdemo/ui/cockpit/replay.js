// Replay of all lanes on one clock from the recorded times, where steps after the current time are hidden, and the
// walkthrough of the recorded example, which uses it.

import { make, seconds, setText, withNoun } from "./elements.js";
import { placeAllGuesses, scrollLane } from "./lanes.js";
import { slowRate } from "./pace.js";
import { closeTimeline, openTimeline, showHeadline, showPosition, showRates } from "./result.js";
import { $, isComplete, current, element, lanes, reducedMotion } from "./state.js";
import { hideTooltip } from "./tooltip.js";

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

function play(rate = Number($("#race-speed").value)) {
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

// --- walkthrough of the recorded example: a step in three stages, then the others, and the end of both runs ----------

const STAGE_MS = 1000; // of the first step
const READ_MS = 2500, STEP_MS = 600; // after the first step, and per further step
const STAGES = ["guessed", "checked", ""]; // drafts in grey, in the target's pass, with their outcomes

let walkAt = 0;
let walkTimer = 0; // of the next stage or step; 0 while it waits for a button

export function beginWalk() {
  $("#walk").hidden = false;
  document.body.dataset.example = "yes";
  $(".cockpit").classList.add("example");
  setText(document.getElementById("run"), "Run live");
  showHeadline();
  startWalk(!reducedMotion.matches);
}

export function endWalk() {
  pauseWalk();
  current.walking = false;
  $("#walk").hidden = true;
  delete document.body.dataset.example;
  $(".cockpit").classList.remove("example");
  const button = document.getElementById("run");
  if (button) setText(button, "Run");
}

function walkSteps() { return lanes[current.frame.plan[0]].steps; }

function startWalk(plays) { // with the first step that has several outcomes
  const kinds = walkSteps().map(({ span }) => new Set([...span.children].map((token) => token.dataset.kind)));
  const telling = kinds.findIndex((step) => step.has("accepted") && step.has("correction"));
  const drafted = kinds.findIndex((step) => step.has("accepted") || step.has("rejected"));
  walkAt = Math.max(telling, 0) || Math.max(drafted, 0);
  showWalkStep(plays ? 0 : STAGES.length - 1);
  if (plays) after(STAGE_MS, () => playStages(1));
}

function playStages(stage) {
  showWalkStep(stage);
  if (STAGES[stage]) after(STAGE_MS, () => playStages(stage + 1));
  else after(READ_MS, playOn);
}

function playOn() {
  moveTo(walkAt + 1);
  if (walkAt < walkSteps().length) after(STEP_MS, playOn);
}

function after(time, action) {
  clearTimeout(walkTimer);
  walkTimer = setTimeout(() => { walkTimer = 0; action(); showButtons(); }, time);
  showButtons();
}

function pauseWalk() {
  clearTimeout(walkTimer);
  walkTimer = 0;
  showStage(null, "");
  if (current.walking) showButtons();
}

function showStage(span, stage) {
  for (const earlier of element.querySelectorAll(".round[data-stage]")) delete earlier.dataset.stage;
  if (stage) span.dataset.stage = stage;
  placeAllGuesses(); // guesses of the stage stand inside the text
}

function moveTo(i) { // after the last step, the other run ends too
  walkAt = i;
  if (i < walkSteps().length) return showWalkStep(STAGES.length - 1);
  seek(replayClock.end);
  setText($("#step-words"), "The end.");
}

function showWalkStep(stage) {
  const steps = walkSteps(), { span, t } = steps[walkAt];
  seek(t);
  showStage(span, STAGES[stage]);
  const hidden = (i) => (i > stage ? "visibility: hidden" : null); // keeps its place, so the text below does not move
  const sentences = [`Step ${walkAt} of ${steps.length - 1}: `, ...stepWords(span)];
  $("#step-words").replaceChildren(...sentences.map((text, i) => make("span", { text: `${text} `, style: hidden(i - 1) })));
}

function showButtons() {
  const ended = walkAt >= walkSteps().length;
  $("#next-step").disabled = ended;
  setText($("#play-steps"), walkTimer ? "❚❚ Pause" : ended ? "▶ Play again" : "▶ Play");
}

function stepWords(span) {
  const count = (...kinds) => [...span.children].filter((token) => kinds.includes(token.dataset.kind)).length;
  const [accepted, rejected, untested] = [count("accepted"), count("rejected"), count("ignored")];
  const guesses = accepted + rejected + untested;
  if (!guesses) return ["no guess.", "The large model wrote one token.", ""];
  const fate = rejected ? " kept, 1 replaced" : count("bonus") ? " kept, and one more for free" : " kept";
  const end = `${rejected ? "" : "All "}${accepted}${fate}`;
  const outcome = untested ? `${end}, ${untested} thrown away.` : `${end}.`;
  return [`${withNoun(guesses, "guess")}.`, "Checked at once.", outcome];
}

export function connectReplay() {
  $("#race-play").addEventListener("click", () => { pauseWalk(); replayClock.playing ? pause() : play(); });
  $("#slow-motion").addEventListener("click", () => { pause(); endWalk(); if (replayClock.at >= replayClock.end) seek(0); play(slowRate()); });
  $("#race-speed").addEventListener("change", (e) => { replayClock.rate = Number(e.target.value); });
  $("#race-at").addEventListener("input", (e) => { pause(); pauseWalk(); seek(Number(e.target.value)); });
  $("#next-step").addEventListener("click", () => { pause(); pauseWalk(); moveTo(walkAt + 1); showButtons(); });
  $("#play-steps").addEventListener("click", () => {
    pause();
    if (walkTimer) { pauseWalk(); moveTo(walkAt); }
    else if (walkAt >= walkSteps().length) startWalk(true);
    else playOn();
    showButtons();
  });
}
