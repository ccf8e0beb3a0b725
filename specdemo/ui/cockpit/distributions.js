// Bars of the recorded distributions: [text, p, q] of a token each. Masses that were not recorded are null.

const COMPLETE = 1e-4; // unrecorded mass of a distribution that counts as 0
const MAX_BARS = 8;
const VISIBLE = 5e-4; // smallest mass of a bar

export function tokenNames(records) { // names of events are clearer than contributions to a text
  const names = new Map();
  for (const { step } of records) {
    for (const [n, token] of step.draft.entries()) names.set(token, step.draft_text[n]);
    for (const [k, token] of step.tokens.entries()) names.set(token, step.pieces[k]);
  }
  for (const { step } of records)
    for (const [token, text] of Object.entries(step.texts ?? {})) names.set(Number(token), text);
  return names;
}

export function nodeBars(step, n, names) { // p and q of the most probable and the drafted tokens, and of all others
  if (!step.laws) return [];
  const drafted = step.draft[n];
  const ps = new Map(targetTop(step, step.parents[n])), qs = new Map(draftTop(step, n));
  const mass = (token) => Math.max(ps.get(token) ?? 0, qs.get(token) ?? 0);
  const tokens = [...new Set([...ps.keys(), ...qs.keys()])].sort((a, b) => mass(b) - mass(a));
  const [missingP, missingQ] = [unrecorded(ps), unrecorded(qs)];
  return withOthers(largestMasses(tokens, drafted).map((token) => [nameIn(names, token), ps.get(token) ?? missingP, qs.get(token) ?? missingQ]));
}

export function rivalOf(step, n) { // largest recorded p of the other tokens
  const others = targetTop(step, step.parents[n]).filter(([token]) => token !== step.draft[n]);
  return others.length ? Math.max(...others.map(([, p]) => p)) : null;
}

export function lastBars(step, fromResidual, names) { // distribution that the target's token was chosen from
  const residual = fromResidual ? step.token_top?.top ?? [] : []; // not in older traces
  const masses = new Map(residual.length ? residual : targetTop(step, step.accepted.at(-1) ?? -1));
  const tokens = [...masses.keys()].filter((token) => masses.get(token) > 0 || token === step.token);
  tokens.sort((a, b) => masses.get(b) - masses.get(a));
  const bars = largestMasses(tokens, step.token).map((token) => [nameIn(names, token), masses.get(token), null]);
  return { legend: residual.length ? "residual" : "p", bars: bars.length ? withOthers(bars) : [] };
}

function targetTop(step, node) { return step.laws?.[node + 1].top ?? []; }

function draftTop(step, n) {
  if (step.drafted) return step.drafted[n].top;
  return step.q ? [] : [[step.draft[n], 1]];
}

function nameIn(names, token) { return names.get(token) ?? `id ${token}`; }

function total(masses) { return masses.reduce((sum, mass) => sum + mass, 0); }

function unrecorded(masses) { return total([...masses.values()]) > 1 - COMPLETE ? 0 : null; }

function largestMasses(tokens, required) { return tokens.filter((token, i) => i < MAX_BARS || token === required); }

function withOthers(bars) {
  const known = (k) => bars.map((bar) => bar[k]).filter((mass) => mass !== null);
  const p = Math.max(0, 1 - total(known(1)));
  const q = known(2).length ? Math.max(0, 1 - total(known(2))) : null;
  return Math.max(p, q ?? 0) >= VISIBLE ? [...bars, ["others", p, q]] : bars;
}
