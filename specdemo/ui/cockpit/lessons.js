// Lessons: bars, time axes, step players and the prediction of the speed-up, from recorded runs.

import { countSteps, drawBlocks, drawChart } from "./charts.js";
import { drawSource } from "./draft_sources.js";
import { barRow, make, seconds, setText } from "./elements.js";
import { createPlayer, showPlayer } from "./step_player.js";
import { stepDetails } from "./steps.js";

function lastStep([{ head, header }, ...records]) { return stepDetails({ head, header, records }, records.length - 1); }

function askQuestions(element) { // the first choice counts
  const results = [], lessons = [...element.querySelectorAll("section.lesson")];
  for (const [i, lesson] of lessons.entries()) {
    const choices = [...lesson.querySelectorAll(".choice")], right = lesson.querySelector("[data-right]");
    const reveal = () => {
      right.dataset.state = "right";
      lesson.querySelector(".answer").hidden = false;
    };
    const choose = (chosen) => {
      if (results[i] !== undefined) return;
      results[i] = chosen === right;
      for (const choice of choices) {
        choice.setAttribute("aria-pressed", String(choice === chosen));
        choice.setAttribute("aria-disabled", "true");
      }
      if (!results[i]) chosen.dataset.state = "wrong";
      reveal();
      setText(lesson.querySelector(".reply"), results[i] ? "Right." : `Not so. The answer is: ${right.textContent}.`);
      drawScore(element, results.filter((result) => result !== undefined), lessons.length);
    };
    for (const choice of choices) choice.addEventListener("click", () => choose(choice));
    window.addEventListener("beforeprint", reveal);
  }
}

function drawScore(element, answered, count) {
  const score = `${answered.filter(Boolean).length} of ${answered.length} right`;
  const left = count - answered.length;
  setText(element.querySelector("#lesson-score"), left ? `${score}, ${left} to go.` : `Your score: ${score}.`);
}

export function mount({ element, props }) {
  for (const icon of document.querySelectorAll("footer img")) icon.setAttribute("alt", "");
  const inLesson = (id) => element.querySelector(`#lesson-${id}`);

  const { passes, race: recordedRace, survive, copied, costs } = props.lessons;
  const separate = passes.rows * passes.single;
  const rows = [["1 pass over 1", passes.single], [`1 pass over ${passes.rows}`, passes.several], [`${passes.rows} passes over 1`, separate]];
  inLesson("passes").replaceChildren(...rows.map(([label, time]) => barRow(label, time / Math.max(passes.several, separate), `${(1000 * time).toFixed(2)} ms`)));

  const raceEnd = Math.max(...recordedRace.map(([, times]) => times.at(-1)));
  inLesson("race").replaceChildren(...recordedRace.map(([name, times], i) => make("div", { class: "time-row", "data-row": i ? "ar" : "spec" },
    make("span", { text: name }), make("div", { class: "time-bar" }, drawBlocks(times, raceEnd, `${countSteps(times)} in ${seconds(times.at(-1))}`)), make("span", { text: seconds(times.at(-1)) }))));

  for (const [id, records] of [["survive", survive], ["copied", copied]]) showPlayer(createPlayer(inLesson(id)), { ...lastStep(records), source: null });
  inLesson("source").replaceChildren(...drawSource(lastStep(copied).source));

  const SLIDERS = { alpha: ["Share of guesses kept", 0, 0.99, 0.01], gamma: ["Guesses per step", 1, 12, 1], c: ["Cost of a guess", 0, 1, 0.01] };
  const chosen = { ...costs, alpha: Math.round(100 * costs.alpha) / 100, gamma: Math.round(costs.gamma) };

  function predictedSpeedup({ alpha, gamma, c, v, o }) { return (1 - alpha ** (gamma + 1)) / (1 - alpha) / (gamma * c + v + o); }

  function drawPrediction() {
    const points = [...Array(100).keys()].map((i) => [i / 100, predictedSpeedup({ ...chosen, alpha: i / 100 })]);
    const now = predictedSpeedup(chosen), pays = points.find(([, s]) => s > 1);
    const percent = (share) => `${Math.round(100 * share)} %`;
    const least = pays ? `It pays from ${percent(pays[0])} on.` : "It never pays.";
    const words = `At ${percent(chosen.alpha)}, with ${chosen.gamma} guesses of ${chosen.c.toFixed(2)} passes each: ${now.toFixed(2)}×, ${now > 1 ? "faster" : "slower"}. ${least}`;
    const series = [
      { kind: "band", colour: "var(--rejected-ink)", points: [[0, 0, 1], [1, 0, 1]], label: "loses" },
      { kind: "line", colour: "var(--ink)", points },
      { kind: "dot", colour: "var(--ink)", points: [[chosen.alpha, now]] },
    ];
    inLesson("curve").replaceChildren(drawChart({ label: `Predicted speed-up. ${words}`, x: "share of guesses kept", unit: "×", include: [0, 2], series }));
    setText(inLesson("prediction"), words);
  }

  inLesson("sliders").replaceChildren(...Object.entries(SLIDERS).map(([name, [label, min, max, step]]) => {
    const input = make("input", { type: "range", min, max, step, value: chosen[name] });
    input.addEventListener("input", () => { chosen[name] = Number(input.value); drawPrediction(); });
    return make("label", {}, label, input);
  }));
  drawPrediction();

  element.querySelector("#lessons-print").addEventListener("click", () => print());
  window.addEventListener("beforeprint", () => { for (const formula of element.querySelectorAll(".answer > details")) formula.open = true; });
  askQuestions(element);
  const show = (lesson) => {
    lesson.scrollIntoView();
    lesson.focus({ preventScroll: true });
  };
  element.querySelector("nav").addEventListener("click", (e) => {
    const link = e.target.closest("a");
    if (!link) return;
    e.preventDefault(); // the address of the page would end the lessons where it has a query
    show(element.querySelector(link.hash));
  });
  const asked = new URLSearchParams(location.search).get("lesson") ?? location.hash.replace("#lesson-", "");
  if (/^[1-5]$/.test(asked)) show(inLesson(asked));
}
