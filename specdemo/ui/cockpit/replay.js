// The race: what was recorded of all lanes, on one clock. Rounds after the moment on show are hidden, and nothing else
// changes, so its end is what the run left.

const race = { lanes: [], end: 0, at: 0, playing: false, frame: 0, timer: 0, before: 0 };

function openReplay(names) {
  race.lanes = names;
  race.end = Math.max(...names.map((name) => lanes[name].rounds.at(-1).t));
  race.at = race.end;
  const slider = $("#race-at");
  slider.max = race.end;
  slider.value = race.end;
  setText($("#race-play"), names.length > 1 ? "▶ Race" : "▶ Replay");
  setText($("#race-clock"), seconds(race.end));
  $("#race").hidden = false;
  $("#race p").hidden = names.length < 2;
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
    const one = lanes[name];
    const upTo = roundsBy(one.rounds, race.at);
    for (let i = one.shown; i < upTo; i++) one.rounds[i].span.hidden = false;
    for (let i = upTo; i < one.shown; i++) one.rounds[i].span.hidden = true;
    if (one.shown !== upTo) {
      one.shown = upTo;
      follow(one.lane, one.rounds[upTo - 1]?.span);
    }
    const last = one.rounds[upTo - 1];
    const finished = upTo === one.rounds.length;
    setText($(".rate", one.box), !last ? "0 tokens" : `${last.tokens} tokens${finished ? ` in ${seconds(last.t)}` : ""}`);
  }
  if (race.at === race.end) showRates();
  $("#race-at").value = race.at;
  setText($("#race-clock"), seconds(race.at));
  hideTip();
}

function roundsBy(rounds, t) { // how many rounds were over by then
  let [low, high] = [0, rounds.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rounds[middle].t <= t) low = middle + 1;
    else high = middle;
  }
  return low;
}

function follow(lane, span) { // scrolls the lane alone, never the page
  if (!span) { lane.scrollTop = 0; return; }
  const [box, at] = [lane.getBoundingClientRect(), span.getBoundingClientRect()];
  if (at.bottom > box.bottom) lane.scrollTop += at.bottom - box.bottom + 8;
  else if (at.top < box.top) lane.scrollTop += at.top - box.top - 8;
}

function play() {
  if (race.at >= race.end) seek(0);
  race.playing = true;
  race.before = performance.now();
  setText($("#race-play"), "❚❚ Pause");
  // whoever wants less motion sees four pictures a second
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const next = (step) => (calm ? (race.timer = setTimeout(step, 250)) : (race.frame = requestAnimationFrame(step)));
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
