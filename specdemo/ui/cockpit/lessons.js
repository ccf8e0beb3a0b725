// Lessons: bars, time axes, step players and the prediction of the speed-up, from recorded runs.

import { countSteps, drawBlocks, seconds } from "./blocks.js";
import { drawChart } from "./charts.js";
import { bar, make, setText } from "./elements.js";
import { drawSource } from "./sources.js";
import { createPlayer, goTo, showPlayer } from "./step_player.js";
import { stepDetails } from "./steps.js";

function lastStep([{ head, header }, ...records]) { return stepDetails({ head, header, records }, records.length - 1); }

export function mount({ element, props }) {
  for (const icon of document.querySelectorAll("footer img")) icon.setAttribute("alt", "");
  const inLesson = (id) => element.querySelector(`#lesson-${id}`);

  function lessonBar(label, share, value) {
    return make("div", { class: "lesson-bar" }, make("span", { text: label }), make("span", { class: "track" }, bar(share, "p")), make("strong", { text: value }));
  }

  const { passes, race: recordedRace, survive, copied, costs } = props.lessons;
  const longest = Math.max(passes.single, passes.several);
  inLesson("passes").replaceChildren(
    lessonBar("1 token", passes.single / longest, `${(1000 * passes.single).toFixed(2)} ms`),
    lessonBar(`${passes.rows} tokens`, passes.several / longest, `${(1000 * passes.several).toFixed(2)} ms`));

  const raceEnd = Math.max(...recordedRace.map(([, times]) => times.at(-1)));
  inLesson("race").replaceChildren(...recordedRace.map(([name, times], i) => make("div", { class: "time-row", "data-row": i ? "ar" : "spec" },
    make("span", { text: name }), make("div", { class: "time-bar" }, drawBlocks(times, raceEnd, `${countSteps(times)} in ${seconds(times.at(-1))}`)), make("span", { text: seconds(times.at(-1)) }))));

  for (const [id, records] of [["survive", survive], ["copied", copied]]) {
    const player = createPlayer(inLesson(id));
    showPlayer(player, { ...lastStep(records), source: null }); // the source is the answer
    goTo(player, 0); // the reader guesses first
    window.addEventListener("beforeprint", () => goTo(player, Infinity));
  }
  inLesson("source").replaceChildren(...drawSource(lastStep(copied).source));

  const SLIDERS = { alpha: ["Acceptance α", 0, 0.99, 0.01], gamma: ["Guesses per step γ", 1, 12, 1], c: ["Cost of a guess c", 0, 1, 0.01] };
  const chosen = { ...costs, alpha: Math.round(100 * costs.alpha) / 100, gamma: Math.round(costs.gamma) };

  function predictedSpeedup({ alpha, gamma, c, v, o }) { return (1 - alpha ** (gamma + 1)) / (1 - alpha) / (gamma * c + v + o); }

  function drawPrediction() {
    const points = [...Array(100).keys()].map((i) => [i / 100, predictedSpeedup({ ...chosen, alpha: i / 100 })]);
    const now = predictedSpeedup(chosen), pays = points.find(([, s]) => s > 1);
    const words = `α ${chosen.alpha.toFixed(2)}, γ ${chosen.gamma}, c ${chosen.c.toFixed(2)}: ${now.toFixed(2)}×, ${now > 1 ? "faster" : "slower"}. ${pays ? `It pays from α ${pays[0].toFixed(2)} on.` : "It pays for no acceptance."}`;
    const series = [
      { kind: "band", colour: "var(--rejected-ink)", points: [[0, 0, 1], [1, 0, 1]], label: "loses" },
      { kind: "line", colour: "var(--ink)", points },
      { kind: "dot", colour: "var(--ink)", points: [[chosen.alpha, now]] },
    ];
    inLesson("curve").replaceChildren(drawChart({ label: `Predicted speed-up by acceptance. ${words}`, x: "α", unit: "×", include: [0, 2], series }));
    setText(inLesson("prediction"), words);
  }

  inLesson("sliders").replaceChildren(...Object.entries(SLIDERS).map(([name, [label, min, max, step]]) => {
    const input = make("input", { type: "range", min, max, step, value: chosen[name] });
    input.addEventListener("input", () => { chosen[name] = Number(input.value); drawPrediction(); });
    return make("label", {}, label, input);
  }));
  drawPrediction();

  element.querySelector("#lessons-print").addEventListener("click", () => print());
  window.addEventListener("beforeprint", () => { for (const answer of element.querySelectorAll(".lesson > details")) answer.open = true; });
  const asked = new URLSearchParams(location.search).get("lesson") ?? location.hash.replace("#lesson-", "");
  if (/^[1-5]$/.test(asked)) inLesson(asked).scrollIntoView();
}
