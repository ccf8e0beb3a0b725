// Replay of all lanes on one clock from the recorded times. Steps after the current time are hidden.

const race = { lanes: [], end: 0, at: 0, playing: false, frame: 0, timer: 0, before: 0 };

function openReplay(names) {
  race.lanes = names;
  race.end = Math.max(...names.map((name) => lanes[name].steps.at(-1).t));
  race.at = race.end;
  const slider = $("#race-at");
  slider.max = race.end;
  slider.value = race.end;
  setText($("#race-play"), names.length > 1 ? "▶ Race" : "▶ Replay");
  setText($("#race-clock"), seconds(race.end));
  $("#race").hidden = false;
  for (const note of element.querySelectorAll("#race p")) note.hidden = names.length < 2 || !note.textContent;
}

function closeReplay() {
  pause();
  race.lanes = [];
  $("#race").hidden = true;
}

function seconds(t) { return `${t.toFixed(2)} s`; }

function seek(t) {
  race.at = Math.max(0, Math.min(t, race.end));
  for (const name of race.lanes) {
    const replayed = lanes[name];
    const upTo = finishedSteps(replayed.steps, race.at);
    for (let i = replayed.shown; i < upTo; i++) replayed.steps[i].span.hidden = false;
    for (let i = upTo; i < replayed.shown; i++) replayed.steps[i].span.hidden = true;
    if (replayed.shown !== upTo) {
      replayed.shown = upTo;
      scrollLane(replayed.lane, replayed.steps[upTo - 1]?.span);
    }
    const last = replayed.steps[upTo - 1];
    const finished = upTo === replayed.steps.length;
    setText($(".rate", replayed.box), !last ? "0 tokens" : `${last.tokens} tokens${finished ? ` in ${seconds(last.t)}` : ""}`);
  }
  if (race.at === race.end) showRates();
  $("#race-at").value = race.at;
  setText($("#race-clock"), seconds(race.at));
  hideTooltip();
}

function finishedSteps(steps, t) { // number of steps finished at time t
  let [low, high] = [0, steps.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle].t <= t) low = middle + 1;
    else high = middle;
  }
  return low;
}

function scrollLane(lane, span) { // scroll the lane without scrolling the page
  if (!span) { lane.scrollTop = 0; return; }
  const [box, target] = [lane.getBoundingClientRect(), span.getBoundingClientRect()];
  if (target.bottom > box.bottom) lane.scrollTop += target.bottom - box.bottom + 8;
  else if (target.top < box.top) lane.scrollTop += target.top - box.top - 8;
}

function play() {
  if (race.at >= race.end) seek(0);
  race.playing = true;
  race.before = performance.now();
  setText($("#race-play"), "❚❚ Pause");
  // with reduced motion, update four times per second
  const reduced = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const next = (step) => (reduced ? (race.timer = setTimeout(step, 250)) : (race.frame = requestAnimationFrame(step)));
  const step = () => {
    const now = performance.now();
    seek(race.at + ((now - race.before) / 1000) * Number($("#race-speed").value));
    race.before = now;
    race.at < race.end ? next(step) : pause();
  };
  next(step);
}

function pause() {
  race.playing = false;
  cancelAnimationFrame(race.frame);
  clearTimeout(race.timer);
  setText($("#race-play"), race.lanes.length > 1 ? "▶ Race" : "▶ Replay");
}

$("#race-play").addEventListener("click", () => (race.playing ? pause() : play()));
$("#race-at").addEventListener("input", (e) => { pause(); seek(Number(e.target.value)); });
