// State that the modules of the cockpit share: the mounted component, the displayed run and its lanes.

export const DISCARDED = new Set(["rejected", "ignored"]);
export const HEADINGS = { spec: "Speculative", ar: "Autoregressive (baseline)", third: "Third run", fourth: "Fourth run" };
export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

/** @type {any} */
export let element = null; // root of the component; its descendants have many types
/** @type {Component["server"]} */
export let server;
/** @type {Component["trigger"]} */
export let trigger; // dispatches an event of the component
export let listeners = new AbortController(); // ends the listeners of a component that is mounted again

const INITIAL = {
  run: null, // id of the displayed run
  started: null, // id of the run that Run started last, in use before its first frame
  busy: false, // from Run until the last frame
  frame: null, // latest frame
  received: 0, // number of records
  pending: [], // records not drawn yet
  drawing: false, // a drawing is scheduled
  frozen: false, // Stop was pressed during a paced display: the rest is shown on request
  skipPacing: false, // display the rest of this run at once
  polling: false, // frames are requested, since no WebSocket could be opened
  walking: false, // the recording waits for *Next step* or *Play*
};
export const current = { ...INITIAL };
export const lanes = {}; // name -> { box, lane, steps: [{ span, t, tokens }], shown }; `tokens` are committed up to that step
export const cellOf = new WeakMap(); // token span -> [cell, step index, template of its explanation]

export const $ = (selector, within = element) => within.querySelector(selector);

export const pageRoot = () => `${window.gradio_config?.root ?? location.origin}/`;

/** @param {Pick<Component, "element" | "server" | "trigger">} component */
export function attach(component) {
  listeners.abort();
  listeners = new AbortController();
  ({ element, server, trigger } = component);
  Object.assign(current, INITIAL, { pending: [] });
}

export function complete() { return Boolean(current.frame?.over) && current.frame.run === current.run; }

export function displaying() { return complete() && current.pending.length > 0 && !current.frozen; }
