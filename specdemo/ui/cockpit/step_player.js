// Player of one step: guesses, target pass, a test per token, correction or bonus, discarded rest. The reader may change
// draws, p and q; unchanged values give the recorded outcomes. Several players can be on a page; each handles keys only
// while it has the focus.

import { withNoun, drawBars, formatNumber, make, setText, tokenClass, visibleText } from "./elements.js";
import { KIND_WORDS } from "./steps.js";

const PHASE_MS = 1100;

export function createPlayer(root, { onphase = () => {} } = {}) {
  const button = (name, label, text) => make("button", { type: "button", class: `small ${name}`, "aria-label": label, text });
  const parts = {
    first: button("first", "Restart the step", "|◀"), back: button("back", "Previous phase", "◀"), play: button("play", "Play the step", "▶ Play"),
    next: button("next", "Next phase", "▶"), reset: make("button", { type: "button", class: "small reset", text: "Restore the run's values", hidden: true }),
    speed: make("select", { "aria-label": "Speed of the player" }, ...[0.5, 1, 2].map((x) => make("option", { value: x, text: `${x}×`, selected: x === 1 }))),
    words: make("p", { class: "narration", "aria-live": "polite" }), rows: make("div", { class: "rows" }), result: make("div", { class: "result" }),
  };
  const controls = make("div", { class: "controls" }, parts.first, parts.back, parts.play, parts.next, parts.speed, parts.reset);
  root.replaceChildren(controls, parts.words, parts.rows, parts.result);
  root.tabIndex = 0;
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "Step player: arrow keys change the phase, Space plays");
  const player = { root, parts, onphase, details: null, edits: {}, phases: [], at: 0, timer: 0, rows: [] };
  const act = { first: () => goTo(player, 0), back: () => goTo(player, player.at - 1), next: () => goTo(player, player.at + 1), play: () => togglePlay(player) };
  for (const [name, action] of Object.entries(act)) parts[name].addEventListener("click", () => { if (name !== "play") pausePlayer(player); action(); });
  parts.reset.addEventListener("click", () => { player.edits = {}; showPlayer(player, player.details, true); });
  root.addEventListener("keydown", (e) => handleKey(player, act, e));
  return player;
}

function handleKey(player, act, e) {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches("input, select")) return;
  const action = { ArrowRight: act.next, ArrowLeft: act.back, Home: act.first, End: () => goTo(player, Infinity) }[e.key];
  const plays = e.key === " " && !e.target.matches("button");
  if (!action && !plays) return;
  e.preventDefault();
  if (action) { pausePlayer(player); action(); } else togglePlay(player);
}

export function showPlayer(player, details, restored = false) { // opens in the final state
  pausePlayer(player);
  Object.assign(player, { details, edits: {} });
  player.root.hidden = !details.nodes.length;
  const tested = testedNodes(decideStep(details));
  const limit = [...new Set([...tested, ...details.nodes.keys()])].slice(0, Math.max(tested.length + 3, 8)); // trees can be large
  player.rows = limit.sort((a, b) => a - b).map((n) => createRow(player, n));
  player.parts.rows.replaceChildren(...player.rows.map(({ row }) => row));
  player.at = Infinity;
  refresh(player);
  if (restored) player.parts.play.focus();
}

function testedNodes({ states }) { return states.flatMap((state, n) => (state === "ignored" ? [] : [n])); }

function createRow(player, n) {
  const node = player.details.nodes[n];
  const able = editable(player.details, n);
  const main = able.includes("draw") ? "draw" : able[0];
  const slider = (name) => {
    const input = make("input", { type: "range", min: 0, max: 1, step: 0.001, class: name === main ? "mark" : "", "aria-label": `${NAMES[name]} of ${JSON.stringify(node.text)}` });
    input.addEventListener("input", () => changeValue(player, n, name, Number(input.value)));
    return input;
  };
  const sliders = Object.fromEntries(able.map((name) => [name, slider(name)]));
  const chip = make("span", { class: tokenClass(node.text), text: visibleText(node.text) });
  const [figures, state] = [make("span", { class: "figures quiet" }), make("strong", { class: "state" })];
  const more = able.filter((name) => name !== main);
  const change = more.length ? make("details", { class: "change" }, make("summary", { text: `Change ${more.join(" and ")}` }),
    ...more.map((name) => make("label", {}, `${name} `, sliders[name], make("output", { class: name })))) : null;
  const row = make("div", { class: "row", "data-node": n, style: `--depth: ${depthOf(player.details.nodes, n)}` },
    make("div", { class: "head" }, chip, figures, state), make("div", { class: "bar" }, ...(main ? [sliders[main]] : [])), ...(change ? [change] : []));
  return { n, row, chip, figures, state, sliders, main };
}

const NAMES = { draw: "Draw", p: "Probability p of the large model", q: "Probability q of the helper" };

function depthOf(nodes, n) {
  let depth = 0;
  for (let node = nodes[n].parent; node >= 0; node = nodes[node].parent) depth += 1;
  return nodes.every((node, i) => node.parent === i - 1) ? 0 : depth; // chains need no indentation
}

function changeValue(player, n, name, value) {
  pausePlayer(player);
  player.edits[n] = { ...player.edits[n], [name]: name === "q" ? Math.max(value, 0.001) : value };
  player.at = Infinity;
  refresh(player);
}

function goTo(player, at) {
  player.at = at;
  refresh(player);
}

function togglePlay(player) {
  if (player.timer) return pausePlayer(player);
  if (player.at >= player.phases.length - 1) goTo(player, 0);
  setText(player.parts.play, "❚❚ Pause");
  const next = () => {
    player.timer = setTimeout(() => {
      goTo(player, player.at + 1);
      if (player.at < player.phases.length - 1) next(); else pausePlayer(player);
    }, PHASE_MS / Number(player.parts.speed.value));
  };
  next();
}

export function pausePlayer(player) {
  clearTimeout(player.timer);
  player.timer = 0;
  setText(player.parts.play, "▶ Play");
}

function refresh(player) {
  const { details, edits, parts } = player;
  if (!details.nodes.length) return;
  const decision = decideStep(details, edits);
  const tests = testedNodes(decision).map((node) => ({ name: "test", node }));
  const rest = decision.states.includes("ignored") ? [{ name: "rest" }] : [];
  player.phases = [{ name: "guess" }, { name: "pass" }, ...tests, { name: "end" }, ...rest];
  player.at = Math.max(0, Math.min(player.at, player.phases.length - 1));
  const phase = player.phases[player.at];
  const reached = new Set(player.phases.slice(0, player.at + 1).filter(({ name }) => name === "test").map(({ node }) => node));
  const past = (name) => player.phases.slice(0, player.at + 1).some((entry) => entry.name === name);
  for (const row of player.rows) updateRow(player, row, decision, { tested: reached.has(row.n), passed: past("pass"), discarded: past("rest") || phase.name === "end", now: phase.node === row.n });
  parts.first.disabled = parts.back.disabled = player.at === 0;
  parts.next.disabled = player.at === player.phases.length - 1;
  parts.reset.hidden = !Object.keys(edits).length;
  player.root.dataset.phase = phase.name;
  setText(parts.words, narrate(player, decision, phase));
  parts.result.replaceChildren(...(past("end") ? [drawResult(details, decision)] : []));
  player.onphase(phase, decision);
}

function updateRow({ details, edits }, { n, row, chip, figures, state, sliders, main }, { values, bounds, states }, shown) {
  const node = details.nodes[n], { p, q, draw } = values[n];
  const untested = states[n] === "ignored";
  const kind = shown.tested ? states[n] : shown.discarded && untested ? "ignored" : "guess";
  chip.dataset.kind = row.dataset.state = kind;
  row.classList.toggle("now", shown.now);
  row.classList.toggle("passed", shown.passed);
  const words = { accepted: "✓ kept", rejected: "✗ rejected", ignored: "thrown away", guess: "" }[kind];
  setText(state, words);
  const guess = q === null ? "" : `q ${formatNumber(q)}`;
  setText(figures, shown.passed ? rowFigures(details.test, node, { p, q, draw, bound: bounds[n] }, edits[n], shown.tested || untested) : guess);
  const mark = { draw: draw ?? ASSUMED_DRAW, p: p ?? 0, q: q ?? 1 };
  for (const [name, input] of Object.entries(sliders)) {
    if (input !== document.activeElement || !edits[n]) input.value = mark[name];
    input.disabled = !shown.passed;
    const out = input.nextElementSibling;
    if (out) setText(out, formatNumber(mark[name]));
  }
  const bound = details.test === "rank" ? node.rival ?? node.best : bounds[n];
  row.style.setProperty("--bound", String(bound ?? 0));
  row.dataset.test = main ? details.test : "none";
}

const ORDINALS = ["first choice", "second choice", "third choice"]; // of the large model

function formatPercent(x) { return x === null ? "–" : x > 0 && x < 0.01 ? "< 1 %" : `${(100 * x).toFixed(0)} %`; }

function rowFigures(test, node, { p, q, draw, bound }, edit, withDraw) {
  if (p === null) return "";
  if (test === "rank") {
    const other = node.rank === 1 ? `the second had ${formatPercent(node.rival)}` : `the first had ${formatPercent(node.best)}`;
    return edit ? `${formatPercent(p)}; ${other}` : `${ORDINALS[node.rank - 1] ?? `choice ${node.rank}`} (${formatPercent(p)}); ${other}`;
  }
  if (test === "bound") return `p ${formatNumber(p)}, accepted from ${formatNumber(bound)}`;
  if (test !== "draw" && test !== "block") return [`p ${formatNumber(p)}`, q !== null && `q ${formatNumber(q)}`].filter(Boolean).join(", ");
  const share = test === "draw" && bound !== null && q !== null && Math.abs(Math.min(1, p / q) - bound) < 1e-3 ? ` → p/q ${p < q ? formatNumber(bound) : "≥ 1"}` : bound === null ? "" : ` → bound ${formatNumber(bound)}`;
  const drawn = !withDraw || bound === null ? "" : draw === null ? "; draw assumed" : `; draw ${formatNumber(draw)}`;
  return [`p ${formatNumber(p)}`, q !== null && `q ${formatNumber(q)}`].filter(Boolean).join(", ") + share + drawn;
}

function narrate({ details }, { states, values, bounds, path, changed }, { name, node }) {
  const { nodes, test } = details;
  if (name === "guess") return [`The helper guessed ${withNoun(nodes.length, "token")}${details.chain ? "" : " in a tree"}.`, details.source?.sentence].filter(Boolean).join(" ");
  if (name === "pass") return test === "none" ? "The large model was not asked in this step." : `The large model checked ${nodes.length === 1 ? "it" : "all of them at once"}.`;
  if (name === "test") {
    const token = JSON.stringify(nodes[node].text), verdict = states[node] === "accepted" ? "kept" : "rejected";
    const bound = formatNumber(bounds[node] ?? null), draw = formatNumber(values[node].draw ?? ASSUMED_DRAW);
    if (test === "rank") return `${token} is ${verdict === "kept" ? "" : "not "}the large model's first choice: ${verdict}.`;
    if (test === "bound") return `${token}: p ${formatNumber(values[node].p)} against ${bound}: ${verdict}.`;
    if (test === "sample" || bounds[node] === null) return `${token}: ${verdict}.`;
    if (test === "block") return `${token}: draw ${draw}, bound ${bound}. The last draw below its bound decides.`;
    return `${token}: draw ${draw} is ${states[node] === "accepted" ? "below" : "not below"} ${bound}: ${verdict}.`;
  }
  const discarded = states.filter((state) => state === "ignored").length;
  if (name === "rest") return `${withNoun(discarded, "guess")} thrown away, since an earlier guess was wrong. The step gives ${withNoun(path.length + (details.last ? 1 : 0), "token")}.`;
  const bonus = endsAtLeaf(details, path);
  const prefix = changed ? "With your values: " : "";
  const last = bonus ? "One more word for free." : "One token is replaced.";
  return prefix + [path.length, "kept.", ...(details.last || changed ? [last] : [])].join(" ");
}

function endsAtLeaf({ nodes }, path) { return !nodes.some((node) => node.parent === (path.at(-1) ?? -1)); }

export function drawCard(kind, text, id = null) {
  const token = make("span", { class: tokenClass(text), "data-kind": kind, text: visibleText(text) });
  const title = make("h3", {}, token, make("small", { text: KIND_WORDS[kind] }));
  return make("article", { class: "node", "data-state": kind, id }, title);
}

export function drawTargetToken(last) {
  const card = drawCard(last.kind, last.text);
  if (last.bars.length) card.append(drawBars(last.bars, last.legend));
  card.append(make("p", { class: "why", text: last.explanation, title: last.formula }));
  return card;
}

function drawResult(details, { path, states, changed }) {
  const { nodes, last, test } = details;
  if (!changed) {
    if (!last) return make("p", { class: "quiet", text: "The text ended here." });
    return drawTargetToken(last);
  }
  if (endsAtLeaf(details, path)) return make("p", { text: "All guesses are kept: one more word follows for free." });
  const end = path.at(-1) ?? -1;
  const rejected = nodes.flatMap((node, n) => (node.parent === end && states[n] === "rejected" ? [n] : []));
  const known = rejected.length && nodes[rejected[0]].bars.length;
  if (!known) return make("p", { text: "The large model chooses another word." });
  const bars = test === "rank" || !details.adjusts && test !== "block" ? nodes[rejected[0]].bars.filter(([text]) => test !== "rank" || text !== nodes[rejected[0]].text) : residualBars(nodes, rejected);
  const label = test === "rank" || (!details.adjusts && test !== "block") ? "p" : "residual of the recorded tokens";
  return make("div", {}, make("p", { text: test === "rank" ? "The large model's first choice replaces it." : "The replacement is drawn from these words." }),
    drawBars(bars.slice(0, 6).map(([text, p]) => [text, p, null]), label));
}

// --- decisions of a step, recomputed after its reader changed p, q or draws ------------------------------------------

const ASSUMED_DRAW = 0.5; // of a token that the run did not test

export function decideStep(details, edits = {}) { // `edits`: node -> { p, q, draw }
  const edited = Object.keys(edits).length > 0;
  const values = details.nodes.map((node, n) => ({ p: node.p, q: node.point ? null : node.q, draw: node.draw, ...edits[n] }));
  const bounds = values.map((_, n) => boundOf(details, values, edits, n));
  const passes = (n) => passesTest(details, values[n], bounds[n], edits[n], n);
  const { path, tested } = details.test === "block" ? lastPassing(details, passes) : descend(details, passes);
  const recomputed = details.nodes.map((_, n) => (path.includes(n) ? "accepted" : tested.has(n) ? "rejected" : "ignored"));
  const states = edited ? recomputed : details.nodes.map((node) => node.state);
  const changed = states.some((state, n) => state !== details.nodes[n].state);
  return { values, bounds, path: edited ? path : details.path, states, changed };
}

export function editable({ test, nodes }, n) { // names of the values that may be changed
  const node = nodes[n];
  if (node.p === null || test === "none" || test === "sample") return [];
  if (test === "rank" || test === "bound") return node.rival === null && test === "rank" ? [] : ["p"];
  const free = test === "draw" && !earlierSiblings(nodes, n).length; // other bounds depend on other tokens, too
  return free ? (node.point ? ["draw", "p"] : ["draw", "p", "q"]) : ["draw"];
}

function wasTested(node) { return node.state === "accepted" || node.state === "rejected"; }

function passesTest({ test, nodes }, { p, q, draw }, bound, edit, n) {
  const node = nodes[n];
  if (wasTested(node) && (!edit || test === "sample" || test === "none") && bound === node.bound) return node.state === "accepted";
  if (test === "rank") return p !== null && (edit ? p > (node.rival ?? 1) : node.rank === 1);
  if (test === "bound") return p >= bound;
  return q !== 0 && (draw ?? ASSUMED_DRAW) < bound;
}

function descend(details, passes) { // to the first child that passes; stop where the run stopped, unless it differs
  const { nodes } = details;
  const tested = new Set(), path = [];
  let differs = false;
  for (let node = -1; ;) {
    const children = nodes.flatMap((child, n) => (child.parent === node ? [n] : []));
    if (!differs && !children.some((n) => wasTested(nodes[n]))) break;
    const next = children.find((n) => {
      if (!differs && !wasTested(nodes[n])) differs = true; // an accepted sibling was rejected
      const passed = passes(n);
      differs ||= passed !== (nodes[n].state === "accepted");
      tested.add(n);
      return passed;
    });
    if (next === undefined) break;
    path.push(next);
    node = next;
  }
  return { path, tested };
}

function lastPassing({ nodes }, passes) { // block verification accepts up to the last draw below its bound
  const end = nodes.findLastIndex((_, n) => passes(n));
  return { path: nodes.slice(0, end + 1).map((_, n) => n), tested: new Set(nodes.keys()) };
}

function earlierSiblings(nodes, n) { return nodes.flatMap((node, k) => (k < n && node.parent === nodes[n].parent ? [k] : [])); }

function boundOf({ nodes, test, scales }, values, edits, n) { // siblings after the first keep their recorded bound
  const node = nodes[n], edit = edits[n] ?? {}, { p, q } = values[n];
  const siblings = earlierSiblings(nodes, n);
  const edited = "p" in edit || "q" in edit;
  if (test === "bound" && node.bound !== null) return scales && edit.q && node.q ? (node.bound * edit.q) / node.q : node.bound;
  if (test !== "draw" || (!edited && node.bound !== null) || p === null) return node.bound;
  const left = siblings.length ? residualBars(nodes, siblings).find(([text]) => text === node.text)?.[1] : null;
  return Math.min(1, (left ?? p) / (q ?? 1));
}

function residualBars(nodes, rejected) { // max(p - q, 0) of the recorded tokens, normalised, sibling by sibling
  let left = nodes[rejected[0]].bars.map(([text, p]) => [text, p ?? 0]);
  for (const n of rejected) {
    const q = new Map(nodes[n].bars.map(([text, , mass]) => [text, mass ?? 0]));
    const rest = left.map(([text, p]) => [text, Math.max(p - (q.get(text) ?? 0), 0)]);
    const total = rest.reduce((sum, [, mass]) => sum + mass, 0);
    left = rest.map(([text, mass]) => [text, total ? mass / total : 0]);
  }
  return left.filter(([, mass]) => mass > 0).sort((a, b) => b[1] - a[1]);
}
