// Details of one step, and the table of all steps of a lane. The server computes both from the trace.

const selected = { lane: null, i: 0, request: 0 }; // step in the inspector
let figuresOf = null; // lane shown in charts and table

function openInspector(names) {
  $("#round-lane").replaceChildren(...names.map((name) => make("option", { value: name, text: `${HEADINGS[name]}: ${$(".title", lanes[name].box).textContent}` })));
  selected.lane = names[0];
  figuresOf = null;
  $("#figures").hidden = false;
  if ($("#figures").open) showFigures();
}

function closeInspector() {
  $("#inspector").hidden = true;
  $("#figures").hidden = true;
  $(".current")?.classList.remove("current");
  selected.request += 1;
}

async function inspectStep(name, i) {
  if (busy || displaying()) return; // the trace is still incomplete
  const request = (selected.request += 1);
  const [previousLane, runId] = [selected.lane, run];
  Object.assign(selected, { lane: name, i });
  const text = await server.round([runId, name, i]);
  if (request !== selected.request || runId !== run) return; // superseded by a later request
  if (!text) return setStatus("failed", "the server no longer stores this run: run it again");
  drawStepDetails(JSON.parse(text));
  if (previousLane !== name && $("#figures").open) showFigures();
}

function drawStepDetails(details) {
  $("#inspector").hidden = false;
  $("#round-lane").value = selected.lane;
  const slider = $("#round-at");
  slider.max = details.rounds - 1;
  slider.value = details.i;
  slider.setAttribute("aria-valuetext", `step ${details.i} of ${details.rounds - 1}`);
  setText($("#round-number"), `${details.i} of ${details.rounds - 1}`);
  const facts = details.facts.map(([name, value]) => `${name} ${value}`).join(" · ");
  setText($("#round-words"), `${details.words} At ${details.t.toFixed(3)} s. ${facts}.`);
  $("#round-tree").replaceChildren(...(details.chain ? [] : [drawTree(details)]));
  const cards = details.nodes.map((node, n) => drawNode(node, n));
  if (details.last) cards.push(drawTargetToken(details.last));
  $("#round-nodes").replaceChildren(...cards);
  $("#round-times").replaceChildren(drawTimes(details.times));
  $(".current")?.classList.remove("current");
  const { span } = lanes[selected.lane].steps[details.i];
  span.classList.add("current");
  scrollLane(lanes[selected.lane].lane, span);
}

function visibleText(text) { return text === "" ? "◌" : text.replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣"); }

function drawNode(node, n) {
  const title = make("h3", {}, make("span", { class: "tok", "data-kind": node.state, text: visibleText(node.text) }),
    make("small", { text: node.state === "ignored" ? "not tested" : node.state }));
  const card = make("article", { class: "node", "data-state": node.state, id: `node-${n}` }, title);
  if (node.bound !== null) card.append(drawTest(node));
  if (node.bars.length) card.append(drawBars(node.bars, "p", "q"));
  const entropy = node.entropy_p === null ? [] : [`H(p) ${node.entropy_p.toFixed(2)}`, ...(node.entropy_q === null ? [] : [`H(q) ${node.entropy_q.toFixed(2)}`])];
  const beta = node.beta === null ? [] : [`β ${node.beta.toFixed(3)}`];
  const decision = decisionRows(node).map(([name, value]) => `${name.split(",")[0]} ${value}`);
  const facts = [...decision, ...beta, ...entropy].join(" · ");
  card.append(make("p", { class: "quiet", text: facts }), make("p", { class: "why", text: node.words }));
  return card;
}

function drawTest(node) { // the draw, or without one p, and the bound it is compared with
  const x = (share) => 4 + 192 * share;
  const [from, width] = node.draw === null ? [node.bound, 1 - node.bound] : [0, node.bound]; // accepted values
  const parts = [svg("rect", { x: x(0), y: 8, width: 192, height: 8, class: "lost" }), svg("rect", { x: x(from), y: 8, width: 192 * width, height: 8, class: "kept" })];
  const value = node.draw ?? node.p;
  parts.push(svg("path", { d: `M${x(Math.min(1, value))} 3v18`, class: "draw" }));
  const words = node.draw === null ? `p ${formatNumber(value)} against the rule's bound ${formatNumber(node.bound)}` : `The draw ${formatNumber(value)} against the bound ${formatNumber(node.bound)}`;
  return canvas(words, 200, 24, ...parts, svg("title", { text: words }));
}

function drawBars(bars, ...names) { // a row per token: p above q, their minimum shaded
  const rows = bars.map(([text, p, q]) => {
    const width = (mass) => 100 * Math.min(1, Math.max(0, mass ?? 0));
    const track = make("span", { class: "track" });
    const bar = (mass, kind) => { const span = make("span", { class: kind }); span.style.width = `${width(mass)}%`; return span; };
    track.append(bar(p, "p"));
    if (names.length > 1) { track.append(bar(q, "q")); if (p !== null && q !== null) track.append(bar(Math.min(p, q), "both")); }
    const number = (mass) => (mass === null ? "?" : mass.toFixed(3));
    const masses = names.length > 1 ? `${number(p)} ${number(q)}` : number(p);
    return make("div", { class: "law" }, make("code", { text: visibleText(text) }), track, make("span", { class: "mass", text: masses }));
  });
  const key = (kind) => make("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
  const legend = names.length > 1 ? [key("p"), "p target ", key("q"), "q drafter ", key("both"), "both"] : [key("p"), names[0]];
  return make("div", { class: "laws" }, make("p", { class: "quiet" }, ...legend), ...rows);
}

function drawTargetToken(last) {
  const card = make("article", { class: "node", "data-state": last.kind }, make("h3", {},
    make("span", { class: "tok", "data-kind": last.kind, text: visibleText(last.text) }), make("small", { text: last.kind })));
  if (last.bars.length) card.append(drawBars(last.bars, last.law === "p" ? "p" : "residual"));
  card.append(make("p", { class: "why", text: last.words }));
  return card;
}

function drawTimes(times) {
  const total = times.draft + times.verify + times.host;
  const bar = make("div", { class: "times", "aria-hidden": "true" });
  for (const part of PARTS) { const span = make("span", { class: part }); span.style.width = `${(100 * times[part]) / total}%`; bar.append(span); }
  const words = PARTS.map((part) => make("span", { class: part, text: `${part} ${(1000 * times[part]).toFixed(2)} ms` }));
  return make("div", {}, bar, make("p", { class: "key" }, ...words));
}

function drawTree({ nodes, path }) { // depth to the right, leaves from top to bottom
  const depth = [], row = [], accepted = new Set(path);
  let leaves = 0;
  const children = (n) => nodes.flatMap((node, i) => (node.parent === n ? [i] : []));
  const place = (n, d) => {
    const below = children(n);
    for (const child of below) place(child, d + 1);
    if (n < 0) return;
    depth[n] = d;
    row[n] = below.length ? (row[below[0]] + row[below.at(-1)]) / 2 : leaves++;
  };
  place(-1, 0);
  const x = (n) => (n < 0 ? 8 : 8 + depth[n] * 92), y = (n) => (n < 0 ? (10 + Math.max(leaves - 1, 0) * 13) : 14 + row[n] * 26);
  const wide = 8 + (Math.max(0, ...depth) + 1) * 92, high = 16 + Math.max(leaves, 1) * 26;
  const edges = nodes.map((node, n) => svg("path", { d: `M${x(node.parent) + (node.parent < 0 ? 0 : 70)} ${y(node.parent)}L${x(n)} ${y(n)}`, class: accepted.has(n) ? "edge path" : "edge" }));
  const labels = nodes.map((node, n) => {
    const group = svg("g", { class: `leaf ${node.state}` }, svg("rect", { x: x(n), y: y(n) - 10, width: 70, height: 20, rx: 4 }),
      svg("text", { x: x(n) + 35, y: y(n) + 4, class: "middle", text: visibleText(node.text).slice(0, 9) }), svg("title", { text: `${node.text}: ${node.words}` }));
    group.addEventListener("click", () => { const card = $(`#node-${n}`); if (card) $("#round-nodes").scrollLeft = card.offsetLeft - $("#round-nodes").offsetLeft; });
    return group;
  });
  const picture = canvas(`The draft as a tree of ${nodes.length} tokens, ${path.length} of them accepted`, wide, high, ...edges, svg("circle", { cx: x(-1), cy: y(-1), r: 4, class: "root" }), ...labels);
  picture.style.width = `${wide}px`;
  return picture;
}

// --- all rounds ------------------------------------------------------------------------------------------------

async function showFigures() {
  const [runId, name] = [run, selected.lane];
  if (figuresOf === name) return;
  figuresOf = name;
  const text = await server.figures([runId, name]);
  if (runId !== run || figuresOf !== name) return;
  if (!text) return setStatus("failed", "the server no longer stores this run: run it again");
  const figures = JSON.parse(text);
  $("#chart-positions").replaceChildren(chartPositions(figures.positions));
  $("#chart-times").replaceChildren(chartTimes(figures.rows));
  $("#chart-whatif").replaceChildren(chartWhatIf(figures.what_if, figures.why_not));
  const head = make("thead", {}, make("tr", {}, ...figures.columns.map((text) => make("th", { scope: "col", text: text.replace(/_/g, " ").replace("round", "step") }))));
  const body = make("tbody");
  for (const cells of figures.rows) {
    const row = make("tr", {}, ...cells.map((cell, k) => make("td", { text: cell === null ? "–" : k === 12 ? visibleText(cell) : String(cell) })));
    row.addEventListener("click", () => inspectStep(name, cells[0]));
    body.append(row);
  }
  $("#rounds").replaceChildren(make("caption", { text: `${HEADINGS[name]}: ${$(".title", lanes[name].box).textContent}` }), head, body);
}

$("#figures").addEventListener("toggle", () => { if ($("#figures").open) showFigures(); });
$("#round-lane").addEventListener("change", (e) => inspectStep(e.target.value, Math.min(selected.i, lanes[e.target.value].steps.length - 1)));
$("#round-at").addEventListener("input", (e) => inspectStep(selected.lane, Number(e.target.value)));
$("#round-back").addEventListener("click", () => inspectStep(selected.lane, Math.max(0, selected.i - 1)));
$("#round-on").addEventListener("click", () => inspectStep(selected.lane, Math.min(lanes[selected.lane].steps.length - 1, selected.i + 1)));
$("#round-close").addEventListener("click", () => { $("#inspector").hidden = true; $(".current")?.classList.remove("current"); });
