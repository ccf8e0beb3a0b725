// The result in one line, one reason and one suggestion, and the figures of the displayed position.

import { setText } from "./elements.js";
import { setSettings } from "./settings.js";
import { $, current, lanes } from "./state.js";

export function clearHeadline() {
  setText($("#headline"), current.busy ? "Running …" : "");
  $("#headline").dataset.tone = "none";
  setText($("#reason"), "");
  $("#suggestion").hidden = true;
}

export function showHeadline() {
  const { headline } = current.frame;
  if (!headline) return;
  setText($("#headline"), `${current.frame.recorded ? (document.body.dataset.example ? "Example: " : "Recorded: ") : ""}${headline.text}`);
  $("#headline").dataset.tone = headline.tone;
  setText($("#reason"), headline.reason);
  const button = $("#suggestion");
  button.hidden = !headline.suggestion || Boolean(current.frame.recorded);
  if (headline.suggestion) setText(button, headline.suggestion.label);
}

export function connectHeadline() {
  $("#suggestion").addEventListener("click", () => {
    const { press, set } = current.frame.headline.suggestion;
    if (press) return document.getElementById(press).click();
    setSettings(set);
  });
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
