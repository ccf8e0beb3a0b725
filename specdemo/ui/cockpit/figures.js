// The tiles, the rates of the lanes and the curve of speed: slower than the tokens.

const FIGURES_MS = 250; // between two drawings of tiles, clock and curve: nobody reads a dozen a second

let figured = 0; // when tiles, clock and curve were last drawn

function drawFigures() {
  figured = performance.now();
  for (const [name, [value, note]] of Object.entries(state.tiles)) {
    const tile = $(`[data-kpi=${name}]`);
    setText($(".value", tile), value);
    setText($(".note", tile), note);
  }
  showRates();
  showClock();
  spark(); // asks for its size
}

function showRates() {
  for (const [name, rate] of Object.entries(state.rates)) setText($(".rate", lanes[name].box), rate);
}

function spark() {
  const canvas = $(".spark");
  const [width, height, scale] = [canvas.clientWidth, canvas.clientHeight, window.devicePixelRatio || 1];
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const curves = Object.entries(lanes).map(([name, one]) => [name, speeds(one.rounds)]).filter(([, s]) => s.length > 1);
  if (!curves.length) return;
  const top = Math.max(...curves.flatMap(([, s]) => s.map(([, y]) => y))) * 1.1;
  const end = Math.max(...curves.map(([, s]) => s.at(-1)[0]));
  const style = getComputedStyle(element);
  for (const [name, curve] of curves) {
    const first = name === "spec" || curves.length === 1;
    pen.beginPath();
    for (const [x, y] of curve) pen.lineTo((x / end) * (width - 2) + 1, height - 1 - (y / top) * (height - 3));
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    pen.setLineDash(first ? [] : { ar: [3, 3], third: [7, 3], fourth: [1, 3] }[name]);
    pen.strokeStyle = style.getPropertyValue(first ? "--ink" : "--quiet");
    pen.stroke();
  }
}

function speeds(rounds) { // tokens per second over the latest eight rounds; the prefill is left out
  const out = [];
  const every = Math.max(1, Math.floor(rounds.length / 200)); // no more points than can be told apart
  for (let i = 4; i < rounds.length; i += every) {
    const [before, now] = [rounds[Math.max(0, i - Math.max(8, every))], rounds[i]];
    if (now.t > before.t) out.push([now.t - rounds[0].t, (now.tokens - before.tokens) / (now.t - before.t)]);
  }
  return out;
}
