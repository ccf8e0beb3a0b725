// The recorded example explains itself: a step in three stages, then the others, and the end of both runs.

import { withNoun, make, setText } from "./elements.js";
import { placeAllGuesses } from "./guesses.js";
import { showHeadline } from "./headline.js";
import { pause, replayClock, seek } from "./replay.js";
import { $, current, element, lanes, reducedMotion } from "./state.js";

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

export function pauseWalk() {
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

export function connectWalkthrough() {
  $("#next-step").addEventListener("click", () => { pause(); pauseWalk(); moveTo(walkAt + 1); showButtons(); });
  $("#play-steps").addEventListener("click", () => {
    pause();
    if (walkTimer) { pauseWalk(); moveTo(walkAt); }
    else if (walkAt >= walkSteps().length) startWalk(true);
    else playOn();
    showButtons();
  });
}
