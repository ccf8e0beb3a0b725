// Details of one step of a lane, with its player.

import { bar, canvas, drawBars, make, seconds, setText, svg, visibleText } from "./elements.js";
import { drawSource, highlightSource } from "./draft_sources.js";
import { PART_WORDS, PARTS, showFigures } from "./figures.js";
import { scrollLane } from "./lanes.js";
import { $, current, isDisplaying, element, laneName, lanes, listeners, reducedMotion } from "./state.js";
import { createPlayer, drawCard, drawTargetToken, pausePlayer, showPlayer } from "./step_player.js";
import { decisionRows, stepDetails } from "./steps.js";

const selected = { lane: null, i: 0 }; // step in the inspector
let stepPlayer;

export function openInspector(names) {
  $("#round-lane").replaceChildren(...names.map((name) => make("option", { value: name, text: laneName(name) })));
  selected.lane = names[0];
  $("#figures").hidden = false;
  if ($("#figures").open) showFiguresOfLane();
}

function showFiguresOfLane() {
  const { lane } = selected;
  showFigures(lane, (i) => inspectStep(lane, i));
}

export function closeInspector() {
  hideInspector();
  $("#figures").hidden = true;
}

function hideInspector() {
  pausePlayer(stepPlayer);
  $("#inspector").hidden = true;
  delete $(".stage").dataset.inspector;
  highlightSource(null, null);
  $(".current")?.classList.remove("current");
}

const WIDE_WINDOW = 1600; // pixels of a window in which lanes and inspector are side by side

function placeInspector() { // in a column, or above the lane that is not inspected
  const stage = $(".stage");
  const boxes = Object.values(lanes).map(({ box }) => box).filter((box) => !box.hidden);
  const left = Math.min(...boxes.map((box) => box.offsetLeft));
  const columns = new Set(boxes.map((box) => box.offsetLeft)).size;
  const covering = lanes[selected.lane].box.offsetLeft > left ? "left" : "right";
  stage.dataset.inspector = window.innerWidth >= WIDE_WINDOW || columns === 1 ? "column" : covering;
}

function showPhase(phase, { path }) { // the tested token, and the accepted path of the tree
  for (const [n, leaf] of [...element.querySelectorAll("#round-tree .leaf")].entries()) leaf.classList.toggle("now", phase.node === n || (phase.name === "end" && path.includes(n)));
}

export function inspectStep(name, i) {
  if (current.busy || isDisplaying() || !lanes[name].steps[i]) return; // the run, or its display, is incomplete
  const previousLane = selected.lane;
  Object.assign(selected, { lane: name, i });
  drawStepDetails();
  if (previousLane !== name && $("#figures").open) showFiguresOfLane();
}

function drawStepDetails() {
  const { lane, i } = selected, details = stepDetails(lanes[lane], i), last = lanes[lane].steps.length - 1;
  $("#inspector").hidden = false;
  placeInspector();
  $("#round-lane").value = selected.lane;
  const slider = $("#round-at");
  slider.max = last;
  slider.value = i;
  slider.setAttribute("aria-valuetext", `step ${i} of ${last}`);
  setText($("#round-number"), `${i} of ${last}`);
  const facts = details.facts.map(([name, value]) => `${name} ${value}`).join(" · ");
  setText($("#round-words"), `${details.summary} ${seconds(details.t)} after the start.${facts && ` ${facts}.`}`);
  $("#round-tree").replaceChildren(...(details.chain ? [] : [drawTree(details)]));
  const cards = details.nodes.map((node, n) => drawNode(node, n));
  if (details.last && !cards.length) cards.push(drawTargetToken(details.last)); // otherwise the player shows it
  $("#round-nodes").replaceChildren(...cards);
  showPlayer(stepPlayer, details);
  $("#round-source").replaceChildren(...drawSource(details.source));
  $("#round-times").replaceChildren(details.times.verify === null ? make("p", { class: "quiet", text: "The engine does not report the durations of its steps." }) : drawTimes(details.times));
  $(".current")?.classList.remove("current");
  const { span } = lanes[lane].steps[i];
  span.classList.add("current");
  scrollLane(lanes[lane].lane, span);
  highlightSource(lanes[lane].lane, details.source);
}

function drawNode(node, n) {
  const card = drawCard(node.state, node.text, `node-${n}`);
  if (node.bars.length) card.append(node.point ? drawBars(node.bars, "p") : drawBars(node.bars, "p", "q"));
  const entropy = node.entropy_p === null ? [] : [`H(p) ${node.entropy_p.toFixed(2)}`, ...(node.entropy_q === null ? [] : [`H(q) ${node.entropy_q.toFixed(2)}`])];
  const beta = node.beta === null ? [] : [`β ${node.beta.toFixed(3)}`];
  const decision = (node.p === null ? [] : decisionRows(node)).map(([name, value]) => `${name.split(",")[0]} ${value}`);
  const facts = [...decision, ...beta, ...entropy, ...(node.origin ? [node.origin] : [])].join(" · ");
  card.append(make("p", { class: "why", text: node.explanation }), make("details", {}, make("summary", { text: "Numbers" }), make("p", { class: "quiet", text: facts })));
  return card;
}

function drawTimes(times) {
  const total = times.draft + times.verify + times.host;
  const bars = make("div", { class: "times", "aria-hidden": "true" }, ...PARTS.map((part) => bar(times[part] / total, part)));
  const words = PARTS.map((part) => make("span", { class: part, text: `${PART_WORDS[part]} ${(1000 * times[part]).toFixed(2)} ms` }));
  return make("div", {}, bars, make("p", { class: "key" }, ...words));
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
  const showCard = (n) => $(`#node-${n}`)?.scrollIntoView({ block: "nearest" });
  const labels = nodes.map((node, n) => {
    const label = `${node.text}: ${node.explanation}`;
    const group = svg("g", { class: `leaf ${node.state}`, role: "button", tabindex: n ? -1 : 0, "aria-label": label }, svg("rect", { x: x(n), y: y(n) - 10, width: 70, height: 20, rx: 4 }),
      svg("text", { x: x(n) + 35, y: y(n) + 4, class: "middle", text: visibleText(node.text).slice(0, 9) }), svg("title", { text: label }));
    group.addEventListener("click", () => showCard(n));
    return group;
  });
  const picture = canvas(`The guesses as a tree of ${nodes.length} tokens, ${path.length} of them accepted`, wide, high, ...edges, svg("circle", { cx: x(-1), cy: y(-1), r: 4, class: "root" }), ...labels);
  picture.setAttribute("role", "group");
  picture.addEventListener("keydown", (e) => {
    const at = labels.indexOf(document.activeElement), move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
    if (e.key === "Enter" || e.key === " ") showCard(at);
    else if (move) labels[at + move]?.focus();
    else return;
    e.preventDefault();
  });
  picture.style.width = `${wide}px`;
  return picture;
}

export function connectInspector() {
  stepPlayer = createPlayer($("#player"), { onphase: showPhase });
  $("#figures").addEventListener("toggle", () => { if ($("#figures").open) showFiguresOfLane(); });
  $("#round-lane").addEventListener("change", (e) => inspectStep(e.target.value, Math.min(selected.i, lanes[e.target.value].steps.length - 1)));
  $("#round-at").addEventListener("input", (e) => inspectStep(selected.lane, Number(e.target.value)));
  $("#round-back").addEventListener("click", () => inspectStep(selected.lane, Math.max(0, selected.i - 1)));
  $("#round-on").addEventListener("click", () => inspectStep(selected.lane, Math.min(lanes[selected.lane].steps.length - 1, selected.i + 1)));
  $("#round-close").addEventListener("click", hideInspector);
  $("#inspector").addEventListener("keydown", (e) => {
    if (e.key !== "Escape") return;
    const token = lanes[selected.lane].steps[selected.i]?.span.querySelector(".tok");
    hideInspector();
    if (token) { token.tabIndex = -1; token.focus({ preventScroll: true }); }
  });
  document.addEventListener("keydown", (e) => {
    const target = /** @type {Element} */ (e.target);
    if (e.key === "Escape" && !$("#inspector").contains(target) && !target.closest?.("[aria-expanded=true]")) hideInspector();
  }, { capture: true, signal: listeners.signal });
  window.addEventListener("resize", () => { if (!$("#inspector").hidden) placeInspector(); }, { signal: listeners.signal });
}

export function revealStep(span) { // the inspector, and on phones the token above the drawer
  const behavior = reducedMotion.matches ? "auto" : "smooth";
  const { top } = $("#inspector").getBoundingClientRect();
  if (getComputedStyle($("#inspector")).position !== "fixed") {
    if (top < 0 || top > 0.8 * innerHeight) $("#inspector").scrollIntoView({ block: "nearest", behavior });
    return;
  }
  const hiddenBy = span.getBoundingClientRect().bottom + 12 - top;
  if (hiddenBy > 0) scrollBy({ top: hiddenBy, behavior });
}
