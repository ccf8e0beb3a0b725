// Runs on one time axis, a block per step. Blocks, tokens and a sentence are linked by pointer and keyboard.

const AXIS = 1000, BLOCK = 18;

function drawBlocks(times, end, label) { // `times`: end of each step in seconds; two shades separate the steps
  const x = (t) => (AXIS * t) / end;
  const path = (odd) => times.map((t, i) => (i % 2 === Number(odd) ? `M${x(times[i - 1] ?? 0).toFixed(2)} 0H${x(t).toFixed(2)}V${BLOCK}H${x(times[i - 1] ?? 0).toFixed(2)}Z` : "")).join("");
  const picture = canvas(label, AXIS, BLOCK, svg("path", { d: path(false), class: "even" }), svg("path", { d: path(true), class: "odd" }), svg("rect", { y: 0, height: BLOCK, width: 0, class: "linked" }));
  picture.setAttribute("preserveAspectRatio", "none");
  return picture;
}

function countSteps({ length }) { return `first pass and ${length - 1} steps`; }

function markBlock(picture, times, end, i) { // no block for -1
  const mark = picture.querySelector(".linked"), from = times[i - 1] ?? 0;
  mark.setAttribute("x", i < 0 ? 0 : (AXIS * from) / end);
  mark.setAttribute("width", i < 0 ? 0 : Math.max(2, (AXIS * (times[i] - from)) / end));
}

function openTimeline(names) {
  const end = Math.max(...names.map((name) => lanes[name].steps.at(-1).t));
  $("#timeline").hidden = false;
  $("#time-rows").replaceChildren(...names.map((name) => timeRow(name, end)));
  linkStep(null);
}

function drawPassCosts(costs) { // two bars: a pass that writes one token, and one that checks several
  $("#pass-costs").hidden = !costs;
  if (!costs) return;
  const longest = Math.max(...costs.bars.map(([, s]) => s));
  const row = ([name, s]) => make("div", { class: "time-row" }, make("span", { class: "time-name", text: name }),
    canvas(`${name}: ${(1000 * s).toFixed(1)} ms`, AXIS, BLOCK, svg("rect", { width: (AXIS * s) / longest, height: BLOCK, class: "pass" })), make("span", { text: `${(1000 * s).toFixed(1)} ms` }));
  $("#pass-costs").replaceChildren(make("p", { text: costs.words }), ...costs.bars.map(row));
  for (const picture of element.querySelectorAll("#pass-costs svg")) picture.setAttribute("preserveAspectRatio", "none");
}

function drawRunTable([head, ...rows]) {
  $("#run-table").hidden = !rows.length;
  if (!rows.length) return;
  const row = (cells, tag) => make("tr", {}, ...cells.map((text, k) => make(k ? tag : "th", { text, scope: k ? (tag === "th" ? "col" : null) : tag === "th" ? "col" : "row" })));
  $("#run-table table").replaceChildren(make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
}

function timeRow(name, end) {
  const { steps } = lanes[name], times = steps.map(({ t }) => t);
  const picture = drawBlocks(times, end, `${countSteps(steps)} in ${seconds(times.at(-1))}`);
  const bar = make("div", { class: "time-bar", role: "slider", tabindex: 0, "aria-label": `${HEADINGS[name]}: steps on the time axis`, "aria-valuemin": 0, "aria-valuemax": steps.length - 1, "aria-valuenow": 0 }, picture);
  const step = (e) => { // step under the pointer
    const box = bar.getBoundingClientRect(), t = ((e.clientX - box.left) / box.width) * end;
    return t <= times.at(-1) ? times.findIndex((after) => after >= t) : -1;
  };
  bar.addEventListener("pointermove", (e) => linkStep(name, step(e)));
  bar.addEventListener("pointerleave", () => linkStep(null));
  bar.addEventListener("blur", () => linkStep(null));
  bar.addEventListener("click", (e) => { if (step(e) >= 0) inspectStep(name, step(e)); });
  bar.addEventListener("keydown", (e) => {
    const at = Number(bar.getAttribute("aria-valuenow"));
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: steps.length - 1, Enter: at }[e.key];
    if (next === undefined || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    if (e.key === "Enter") inspectStep(name, at);
    else linkStep(name, Math.max(0, Math.min(next, steps.length - 1)));
  });
  Object.assign(lanes[name], { times, picture, bar, end });
  return make("div", { class: "time-row", "data-row": name }, make("span", { class: "time-name", text: HEADINGS[name] }), bar, make("span", { class: "time-end", text: seconds(times.at(-1)) }));
}

function closeTimeline() {
  linkStep(null);
  $("#timeline").hidden = $("#run-table").hidden = true;
}

function linkStep(name, i = -1) {
  $(".linked-step")?.classList.remove("linked-step");
  for (const { picture, times, end } of Object.values(lanes)) if (picture) markBlock(picture, times, end, -1);
  if (name === null || i < 0) return setText($("#time-words"), summaryOfTimes());
  const { steps, times, picture, bar, end } = lanes[name], step = steps[i];
  markBlock(picture, times, end, i);
  step.span.classList.add("linked-step");
  const tokens = step.tokens - (steps[i - 1]?.tokens ?? 0);
  const text = [...step.span.querySelectorAll(".tok")].filter((span) => !DISCARDED.has(span.dataset.kind)).map((span) => span.textContent).join("");
  const words = `${i ? `Step ${i} of ${steps.length - 1}` : "Prefill"}, ${seconds(times[i - 1] ?? 0)} to ${seconds(times[i])}: ${tokens} token${tokens === 1 ? "" : "s"} ${JSON.stringify(text)}.`;
  bar.setAttribute("aria-valuenow", i);
  bar.setAttribute("aria-valuetext", words);
  setText($("#time-words"), words);
}

function summaryOfTimes() {
  const drawn = race.lanes.filter((name) => lanes[name].steps.length);
  return drawn.map((name) => `${HEADINGS[name]}: ${countSteps(lanes[name].steps)}, ${seconds(lanes[name].steps.at(-1).t)}`).join(". ");
}
