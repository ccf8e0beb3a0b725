// The result in one line, one reason and suggestions, and the figures of the displayed position.

import { make, setText } from "./elements.js";
import { applyExample, exampleNamed, setSettings } from "./settings.js";
import { $, current, lanes } from "./state.js";
import { barTitle, fastestLane } from "./timeline.js";
import { run } from "./transport.js";

export function clearHeadline() {
  setText($("#headline"), current.busy ? "Running …" : "");
  $("#headline").dataset.tone = "none";
  for (const part of ["#reason", "#loss"]) setText($(part), "");
  $("#suggestion").replaceChildren();
}

export function showHeadline() {
  const { headline } = current.frame;
  if (!headline) return;
  const origin = current.frame.recorded ? (document.body.dataset.example ? "Example: " : "Recorded: ") : "";
  const parts = { origin, ...dividedHeadline() };
  $("#headline").replaceChildren(...Object.entries(parts).map(([name, text]) => make("span", { class: name, text })));
  $("#headline").dataset.tone = headline.tone;
  setText($("#reason"), headline.reason);
  setText($("#loss"), headline.loss);
  const possible = current.frame.recorded ? [] : headline.suggestions.filter(({ example }) => !example || exampleNamed(example));
  $("#suggestion").replaceChildren(...possible.map((suggestion) => {
    const button = make("button", { type: "button", class: "small", text: suggestion.label });
    button.addEventListener("click", () => followSuggestion(suggestion));
    return button;
  }));
}

function dividedHeadline() { // a speed-up at the beginning is displayed large
  const text = current.frame.headline?.text ?? "";
  const [factor] = text.match(/^[\d.]+×/) ?? [""];
  return { factor, words: text.slice(factor.length) };
}

/** Result of the run for a picture: the headline, and the time of each lane. */
export function shownResult() {
  const timed = current.frame.plan.filter((name) => lanes[name].times);
  return { ...dividedHeadline(), rows: timed.map((name) => ({ label: barTitle(name), time: lanes[name].times.at(-1), fast: name === fastestLane() })) };
}

function followSuggestion({ press, example, set }) {
  if (press) run(press);
  if (example) applyExample(exampleNamed(example));
  if (set) setSettings(set);
}

export function showPosition() { // while a part of the text is displayed, the figures are those of this part
  const [name] = current.frame.plan;
  const lane = lanes[name];
  const step = lane.steps[lane.shown - 1];
  const partial = lane.shown < lane.steps.length || current.pending.some((record) => record.step && record.l === name);
  if (!step || !partial) return showTiles(current.frame.tiles);
  const first = lane.steps[0].t ? { t: 0, tokens: 0 } : lane.steps[0]; // over a link the clock begins with the prompt
  const [seconds, passes] = [step.t - first.t, lane.shown - 1];
  const figures = {
    acceptance: [step.drafted ? `${((100 * step.accepted) / step.drafted).toFixed(0)} %` : "–", `${step.accepted} of ${step.drafted} drafted`],
    tokens_per_pass: [passes ? ((step.tokens - lane.steps[0].tokens) / passes).toFixed(2) : "–", `${passes} steps`],
    tokens_per_second: [seconds ? ((step.tokens - first.tokens) / seconds).toFixed(1) : "–", `${step.tokens} tokens displayed`],
    speedup: ["–", "at the end"],
  };
  showTiles({ ...current.frame.tiles, ...figures });
}

function showTiles(tiles) {
  for (const [name, [value, note]] of Object.entries(tiles)) {
    const tile = $(`[data-kpi=${name}]`);
    setText($(".value", tile), value);
    setText($(".note", tile), note);
  }
}
