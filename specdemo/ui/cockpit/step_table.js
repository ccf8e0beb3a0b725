// Table of the steps of a lane, and its CSV file.

import { acceptedCount, draftSize } from "./steps.js";

export const COLUMNS = ["round", "t_s", "gamma", "drafted", "tested", "accepted", "committed", "ends_with", "mean_beta", "draft_ms", "verify_ms", "host_ms", "text"];
const FRACTIONS = new Set(["t_s", "mean_beta", "draft_ms", "verify_ms", "host_ms"]);

export function stepTable({ head, records }) { // a row of values per step, null if unknown
  return records.map((record) => {
    const { step } = record;
    const times = [step.draft_s, step.verify_s, step.host_s].map((seconds) => (seconds === null ? null : rounded(1000 * seconds, 3)));
    const counts = [draftSize(step), testedCount(record), acceptedCount(record), step.tokens.length];
    return [step.i, rounded(record.at, 4), head.drafts ? step.gamma : null, ...counts, step.kind, meanBeta(step), ...times, step.text];
  });
}

export function asCsv(lane) { // texts are JSON strings, which spreadsheets do not evaluate as formulas
  const quoted = (text) => `"${JSON.stringify(text).replaceAll('"', '""')}"`;
  const cell = (value, name) => {
    if (value === null) return "";
    if (name === "text") return quoted(value);
    return FRACTIONS.has(name) && Number.isInteger(value) ? value.toFixed(1) : String(value);
  };
  const rows = stepTable(lane).map((row) => row.map((value, k) => cell(value, COLUMNS[k])));
  return [COLUMNS, ...rows].map((row) => `${row.join(",")}\n`).join("");
}

function rounded(x, digits) { return Number(x.toFixed(digits)); }

function meanBeta({ beta }) {
  const known = beta.filter((value) => value !== null);
  return known.length ? rounded(known.reduce((sum, value) => sum + value, 0) / known.length, 3) : null;
}

function testedCount(record) {
  const { step } = record;
  if (step.undisclosed === undefined) return step.beta.filter((beta) => beta !== null).length;
  return acceptedCount(record) + Number(step.undisclosed > 0 && step.token !== null);
}
