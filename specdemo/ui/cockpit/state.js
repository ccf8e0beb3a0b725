// State that the modules of the cockpit share: the mounted component, the displayed run and its lanes, and stored values.

export const DISCARDED = new Set(["rejected", "ignored"]);
export const HEADINGS = { spec: "Speculative", ar: "Baseline", third: "Third run", fourth: "Fourth run" };
export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

/** @type {any} */
export let element = null; // root of the component; its descendants have many types
/** @type {Component["trigger"]} */
export let trigger; // dispatches an event of the component
export let listeners = new AbortController(); // ends the listeners of a component that is mounted again

const INITIAL = {
  run: null, // id of the displayed run
  started: null, // id of the run that Run started last, in use before its first frame
  busy: false, // from Run until the last frame
  frame: null, // latest frame
  records: [], // all records of the run
  pending: [], // records not drawn yet
  drawing: false, // a drawing is scheduled
  frozen: false, // Stop was pressed during a paced display: the rest is shown on request
  skipPacing: false, // display the rest of this run at once
  polling: false, // frames are requested, since no WebSocket could be opened
  walking: false, // the recording waits for *Next step* or *Play*
};
export const current = { ...INITIAL };
// Name -> { box, lane, head, header, records, steps, shown }; `records` are those of its steps. `steps` are drawn, as
// { span, t, tokens, accepted, drafted }, with counts up to that step. `credit`: tokens to be displayed now.
export const lanes = {};
export const tokenData = new WeakMap(); // token span -> { token, record }

export const $ = (selector, within = element) => within.querySelector(selector);

export const pageRoot = () => `${window.gradio_config?.root ?? location.origin}/`;

/** @param {Pick<Component, "element" | "trigger">} component */
export function attach(component) {
  listeners.abort();
  listeners = new AbortController();
  ({ element, trigger } = component);
  Object.assign(current, INITIAL, { records: [], pending: [] });
}

export function laneName(name) { return current.frame.names[name] ?? HEADINGS[name]; } // the method, if several are compared

export function isComplete() { return Boolean(current.frame?.over) && current.frame.run === current.run; }

export function isDisplaying() { return isComplete() && current.pending.length > 0 && !current.frozen; }

// Values of the visitor between visits. Where the browser refuses storage, as in frames of other sites, they last as
// long as the page.

const refused = new Map();

/** @param {"localStorage" | "sessionStorage"} area */
export function readStored(key, area = "localStorage") {
  try {
    return window[area].getItem(key);
  } catch {
    return refused.get(key) ?? null;
  }
}

/** @param {"localStorage" | "sessionStorage"} area */
export function store(key, value, area = "localStorage") {
  try {
    window[area].setItem(key, value);
  } catch {
    refused.set(key, value);
  }
}
