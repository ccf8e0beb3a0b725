// Steps in detail. The record of a step contains its trace line `step`, and from the server: outcome, reason and deciding
// figures of each draft token (`nodes`), the reason of the target's token (`why`), and `by` if the target did not verify.

import { describeOrigin, describeSource, isChain } from "./draft_sources.js";
import { withNoun, formatNumber } from "./elements.js";

const LINK_FACTS = [
  { name: "cloud_s", label: "cloud, ms", scale: 1000, digits: 1 },
  { name: "rtt_s", label: "waiting for the link, ms", scale: 1000, digits: 1 },
  { name: "sent", label: "requests", scale: 1, digits: 0 },
  { name: "bytes_up", label: "bytes up", scale: 1, digits: 0 },
  { name: "bytes_down", label: "bytes down", scale: 1, digits: 0 },
  { name: "hard_ratio", label: "hard", scale: 1, digits: 2 },
];
const SECOND_TRIP = "The rejection needed a second round trip, with the probabilities of the helper.";

export const KIND_WORDS = { // of outcomes
  accepted: "kept", rejected: "rejected", ignored: "thrown away", correction: "the large model’s choice", bonus: "one more for free",
  plain: "no guess", unverified: "not checked", unknown: "not reported",
};

export function shownTokens({ step, nodes, why }) { // accepted path, discarded drafts, tokens of the target
  const drafted = (n, text) => ({ kind: nodes[n].state, text, id: step.draft[n], why: nodes[n].why, decision: decisionOf(nodes[n]) });
  const count = step.accepted.length;
  const path = step.accepted.map((n, k) => drafted(n, step.pieces[k]));
  const discarded = step.draft.flatMap((_, n) => (step.accepted.includes(n) ? [] : [drafted(n, step.draft_text[n])]));
  const chosen = step.pieces.slice(count).map((text, k) => ({ kind: step.kind, text, id: step.tokens[count + k], why, decision: decisionOf({}) }));
  return [...path, ...discarded, ...chosen];
}

function decisionOf({ p = null, q = null, draw = null, bound = null, rank = null, best = null }) { return { p, q, draw, bound, rank, best }; }

export function explain({ reasons }, why, decision) { // reasons are templates with names of figures
  return reasons[why].replace(/\{(\w+)\}/g, (_, name) => (name === "rank" ? decision.rank : formatNumber(decision[name])));
}

export function decisionRows({ p, q, draw, bound, rank, best }) { // the figures that decided about a draft token
  if (rank !== null) return [["large model", `choice ${rank}`], ["its p", formatNumber(p)], ["p of its first choice", formatNumber(best)]];
  const rows = [["p, large model", formatNumber(p)], ["q, helper", q === null ? "none" : formatNumber(q)]];
  if (draw !== null) rows.push(["accepted below", formatNumber(bound)], ["draw", formatNumber(draw)]);
  else if (bound !== null) rows.push(["accepted from p", formatNumber(bound)]);
  return rows;
}

export function draftSize({ draft, undisclosed }) { return draft.length + (undisclosed ?? 0); }

export function acceptedCount({ step, by }) { return by ? 0 : step.accepted.length; }

export function stepDetails(lane, i) { // `lane`: head, header (trace line) and records
  const { head, records } = lane, record = records[i], { step, by } = record;
  const names = tokenNames(records);
  const untested = by || step.beta.every((beta) => beta === null);
  return {
    t: record.at,
    last: step.token === null ? null : targetToken(head, record, names),
    test: untested ? "none" : head.test,
    adjusts: head.adjusts,
    scales: head.scales,
    chain: isChain(step),
    nodes: step.draft.map((_, n) => nodeDetails(head, record, n, names)),
    path: step.accepted,
    source: describeSource(lane, i, names),
    facts: [...lengthFacts(lane, step), ...policyFacts(step), ...linkFacts(step)],
    times: { draft: step.draft_s, verify: step.verify_s, host: step.host_s },
    summary: summarise(record),
  };
}

function nodeDetails(head, { step, nodes }, n, names) {
  const { state, why, beta = null } = nodes[n], decision = decisionOf(nodes[n]);
  return {
    text: step.draft_text[n],
    parent: step.parents[n],
    state,
    ...decision,
    beta,
    point: decision.q === null,
    entropy_p: step.laws?.[step.parents[n] + 1].entropy ?? null,
    entropy_q: step.drafted?.[n].entropy ?? null,
    bars: nodeBars(step, n, names),
    rival: rivalOf(step, n),
    origin: describeOrigin(step.origin?.[n] ?? {}),
    explanation: explain(head, why, decision),
  };
}

function targetToken(head, { step, why }, names) {
  return { text: step.pieces.at(-1), kind: step.kind, explanation: head.reasons[why], formula: head.formulas[why] ?? null, ...lastBars(step, head.residuals.includes(why), names) };
}

function lengthFacts({ head, header: { recipe } }, { gamma }) {
  if (!head.drafts) return [];
  const fixed = (recipe.policy ?? "fixed") === "fixed";
  return [["Guesses allowed:", fixed ? String(gamma) : `${recipe.gamma} at the start, ${gamma} now`]];
}

function policyFacts({ policy }) {
  return Object.entries(policy).map(([name, value]) => [name.replaceAll("_", " "), String(Number(value.toPrecision(3)))]);
}

function linkFacts({ remote }) {
  const known = LINK_FACTS.filter(({ name }) => remote && name in remote);
  return known.map(({ name, label, scale, digits }) => {
    const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    return [label, (remote[name] * scale).toLocaleString("en", format)];
  });
}

function summarise(record) {
  const { step, by } = record, size = draftSize(step);
  if (step.i === 0 && !step.draft.length) return "The large model read the prompt and wrote the first token.";
  if (!size && step.token === null) return `Step of a beam search: all beams agree on ${step.tokens.length} tokens.`;
  if (by) return `${withNoun(step.draft.length, "guess")}, ${step.tokens.length} added without the large model.`;
  if (step.kind === "unknown") return "The counts of the engine do not show how this token was chosen.";
  if (!size) return "There was no guess: the large model wrote one token.";
  const counts = `${withNoun(size, "guess")}, ${acceptedCount(record) || "none"} ${KIND_WORDS.accepted}; ${withNoun(step.tokens.length, "token")} added.`;
  const hidden = step.undisclosed ? ` ${withNoun(step.undisclosed, "guess")} not reported by the engine.` : "";
  return `${counts}${hidden}${step.remote?.rows ? ` ${SECOND_TRIP}` : ""}`;
}

// --- bars ------------------------------------------------------------------------------------------------------------

// Bars of the recorded distributions: [text, p, q] of a token each. Masses that were not recorded are null.

const COMPLETE = 1e-4; // unrecorded mass of a distribution that counts as 0
const MAX_BARS = 8;
const VISIBLE = 5e-4; // smallest mass of a bar

function tokenNames(records) { // names of events are clearer than contributions to a text
  const names = new Map();
  for (const { step } of records) {
    for (const [n, token] of step.draft.entries()) names.set(token, step.draft_text[n]);
    for (const [k, token] of step.tokens.entries()) names.set(token, step.pieces[k]);
  }
  for (const { step } of records)
    for (const [token, text] of Object.entries(step.texts ?? {})) names.set(Number(token), text);
  return names;
}

function nodeBars(step, n, names) { // p and q of the most probable and the drafted tokens, and of all others
  if (!step.laws) return [];
  const drafted = step.draft[n];
  const ps = new Map(targetTop(step, step.parents[n])), qs = new Map(draftTop(step, n));
  const mass = (token) => Math.max(ps.get(token) ?? 0, qs.get(token) ?? 0);
  const tokens = [...new Set([...ps.keys(), ...qs.keys()])].sort((a, b) => mass(b) - mass(a));
  const [missingP, missingQ] = [unrecorded(ps), unrecorded(qs)];
  return withOthers(largestMasses(tokens, drafted).map((token) => [nameIn(names, token), ps.get(token) ?? missingP, qs.get(token) ?? missingQ]));
}

function rivalOf(step, n) { // largest recorded p of the other tokens
  const others = targetTop(step, step.parents[n]).filter(([token]) => token !== step.draft[n]);
  return others.length ? Math.max(...others.map(([, p]) => p)) : null;
}

function lastBars(step, fromResidual, names) { // distribution that the target's token was chosen from
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
