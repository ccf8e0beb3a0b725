// The recorded example explains itself: one step plays without a click, then *Next step* and *Play* continue.

import { make, setText } from "./elements.js";
import { showHeadline } from "./headline.js";
import { play, seek, slowRate } from "./replay.js";
import { $, current, element, lanes, reducedMotion } from "./state.js";

const STAGE_MS = 1000;
const STAGES = ["guessed", "checked", ""]; // drafts in grey, in the target's pass, with their outcomes

let walkAt = 0;
let stageTimer = 0;

export function beginWalk() {
  const { steps } = lanes[current.frame.plan[0]];
  const kinds = steps.map(({ span }) => new Set([...span.children].map((token) => token.dataset.kind)));
  const telling = kinds.findIndex((step) => step.has("accepted") && step.has("correction"));
  const drafted = kinds.findIndex((step) => step.has("accepted") || step.has("rejected"));
  $("#walk").hidden = false;
  document.body.dataset.example = "yes";
  $(".cockpit").classList.add("example");
  setText(document.getElementById("run"), "Run live");
  showHeadline();
  showWalkStep(Math.max(telling, 0) || Math.max(drafted, 0), !reducedMotion.matches);
}

export function endWalk() {
  clearTimeout(stageTimer);
  current.walking = false;
  $("#walk").hidden = true;
  delete document.body.dataset.example;
  $(".cockpit").classList.remove("example");
  const button = document.getElementById("run");
  if (button) setText(button, "Run");
  for (const span of element.querySelectorAll(".round[data-stage]")) delete span.dataset.stage;
}

function showWalkStep(i, animated) {
  const { steps } = lanes[current.frame.plan[0]];
  clearTimeout(stageTimer);
  walkAt = i;
  seek(steps[i].t);
  const { span } = steps[i];
  const sentences = stepWords(span).map((text) => make("span", { text: `${text} ` }));
  $("#step-words").replaceChildren(...sentences);
  const show = (n) => { // later sentences occupy their place, so the text below does not move
    if (STAGES[n]) span.dataset.stage = STAGES[n];
    else delete span.dataset.stage;
    sentences.forEach((sentence, i) => { sentence.style.visibility = i > n ? "hidden" : "visible"; });
    if (n + 1 < STAGES.length) stageTimer = setTimeout(() => show(n + 1), STAGE_MS);
  };
  for (const earlier of element.querySelectorAll(".round[data-stage]")) delete earlier.dataset.stage;
  show(animated ? 0 : STAGES.length - 1);
  $("#next-step").disabled = i + 1 >= steps.length;
}

function stepWords(span) {
  const count = (...kinds) => [...span.children].filter((token) => kinds.includes(token.dataset.kind)).length;
  const [accepted, rejected, untested] = [count("accepted"), count("rejected"), count("ignored")];
  const guesses = accepted + rejected + untested;
  if (!guesses) return ["The helper guessed nothing.", "The large model wrote one token.", ""];
  const fate = rejected ? " kept, 1 replaced" : count("bonus") ? " kept, and one more for free" : " kept";
  const end = `${rejected ? "" : "All "}${accepted}${fate}`;
  const outcome = untested ? `${end}, ${untested} thrown away.` : `${end}.`;
  return [`The helper guessed ${guesses} token${guesses > 1 ? "s" : ""}.`, `The large model checked ${guesses > 1 ? "them at once" : "it"}.`, outcome];
}

export function connectWalkthrough() {
  $("#next-step").addEventListener("click", () => showWalkStep(Math.min(walkAt + 1, lanes[current.frame.plan[0]].steps.length - 1), !reducedMotion.matches));
  $("#play-steps").addEventListener("click", () => { endWalk(); play(slowRate()); });
}
