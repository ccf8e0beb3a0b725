// Decisions of a step, recomputed after its reader changed p, q or draws. Unchanged values give the recorded outcomes.

export const ASSUMED_DRAW = 0.5; // of a token that the run did not test

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
  const share = siblings.length ? massAfter(nodes, siblings, node.text, p) : p;
  return Math.min(1, share / (q ?? 1));
}

function massAfter(nodes, siblings, text, p) { // p of a token in the residual of its earlier siblings
  const left = residualBars(nodes, siblings);
  return left.find(([name]) => name === text)?.[1] ?? p;
}

export function residualBars(nodes, rejected) { // max(p - q, 0) of the recorded tokens, normalised, sibling by sibling
  let left = nodes[rejected[0]].bars.map(([text, p]) => [text, p ?? 0]);
  for (const n of rejected) {
    const q = new Map(nodes[n].bars.map(([text, , mass]) => [text, mass ?? 0]));
    const rest = left.map(([text, p]) => [text, Math.max(p - (q.get(text) ?? 0), 0)]);
    const total = rest.reduce((sum, [, mass]) => sum + mass, 0);
    left = rest.map(([text, mass]) => [text, total ? mass / total : 0]);
  }
  return left.filter(([, mass]) => mass > 0).sort((a, b) => b[1] - a[1]);
}
