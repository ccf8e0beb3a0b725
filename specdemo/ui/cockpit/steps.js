// Steps in detail. The record of a step contains its trace line `step`, and from the server: outcome, reason and deciding
// figures of each draft token (`nodes`), the reason of the target's token (`why`), and `by` if the target did not verify.

import { lastBars, nodeBars, rivalOf, tokenNames } from "./distributions.js";
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
    source: describeSource(lane, i),
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
