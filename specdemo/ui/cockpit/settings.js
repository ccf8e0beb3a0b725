// Settings: the fields of the form, prompt and comparison, their storage, and settings that depend on others.

import { setText } from "./elements.js";
import { $, listeners, readStored, store, trigger } from "./state.js";

const SETTINGS_KEY = "specdemo-settings", LANES_KEY = "specdemo-lanes", GATES_KEY = "specdemo-gates";
const MAX_ADDRESS = 8000; // common limit of servers
const PAIR_OPTIONS = ["pair", "target", "drafter"];

let form; // its fields have `data-setting`
let tables; // of the server: defaults, pairs, methods and presets
let examples;
let latestGates = null; // calibrated on this page
let defaultSettings; // settings of the page without a link and stored settings

const page = (selector) => /** @type {any} */ (document.querySelector(selector));
const prompt = () => page("#prompt textarea");
const comparison = () => page("#compare input");
const fieldOf = (name) => form.querySelector(`[data-setting="${name}"]`);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

function stored(key) {
  try {
    return JSON.parse(readStored(key)) ?? {};
  } catch { // of an earlier version
    return {};
  }
}

function valueOf(field) {
  if (field.tagName === "FIELDSET") return [...field.querySelectorAll(":checked")].map((box) => box.value);
  if (field.type === "checkbox") return field.checked;
  if (field.type === "number") return field.value === "" ? null : field.valueAsNumber;
  return field.value;
}

export function settings() {
  const fields = [...form.querySelectorAll("[data-setting]")].map((field) => [field.dataset.setting, valueOf(field)]);
  return { ...Object.fromEntries(fields), prompt: prompt().value, compare: comparison().checked };
}

function write(name, value) {
  if (name === "prompt") {
    prompt().value = value;
    prompt().dispatchEvent(new Event("input", { bubbles: true }));
    return;
  }
  if (name === "compare") {
    comparison().checked = value;
    comparison().dispatchEvent(new Event("change", { bubbles: true }));
    return;
  }
  const field = fieldOf(name);
  if (!field) return;
  if (field.tagName === "FIELDSET") for (const box of field.querySelectorAll("input")) box.checked = value.includes(box.value);
  else if (field.type === "checkbox") field.checked = value;
  else if (field.tagName !== "SELECT" || [...field.options].some((option) => option.value === value)) field.value = value;
}

export function setSettings(values) { // others remain unchanged
  for (const [name, value] of Object.entries(values)) write(name, value);
  changed();
}

function changed() {
  const values = settings();
  store(SETTINGS_KEY, JSON.stringify(values));
  const url = new URL(location.href); // settings from a link no longer apply after a change
  for (const name of Object.keys(values)) url.searchParams.delete(name);
  if (url.href !== location.href) history.replaceState(null, "", url);
  if (document.body.dataset.estimate) document.body.dataset.estimate = "outdated";
  showDependent(values);
}

function showDependent(values) {
  for (const slider of form.querySelectorAll("[type=range]")) slider.value = slider.parentElement.querySelector("[type=number]").value;
  for (const group of form.querySelectorAll("[data-methods]")) group.hidden = !group.dataset.methods.split(" ").includes(values.method);
  const copy = values.drafter === tables.same ? values.drafter_quantization : values.drafter ? "other" : "";
  $("select", $("#draft-model", form)).value = copy === "none" ? "int8" : copy;
  setText($("#pair p", form), values.target ? "Not used: a target is set under Models and devices." : "");
  if (document.body.dataset.method !== values.method) trigger("select", { method: values.method });
  for (const name of ["chat", "pair", "method"]) document.body.dataset[name] = values[name];
}

// --- settings that depend on others ----------------------------------------------------------------------------------

function choosePair(name) { // a new pair has its own settings and prompt, unless the visitor typed one
  const { method } = settings();
  const own = settingsOfPair(name, tables.methods[method].pairs.includes(name) ? { method } : {});
  const example = examples.ready.find((ready) => ready.pair === name);
  const typed = prompt().value.trim() && !examples.ready.some((ready) => ready.prompt === prompt().value);
  return example && !typed ? example : own;
}

function settingsOfPair(name, named) {
  const { settings: own, policy } = tables.pairs[name];
  const all = { ...own, ...named };
  return { ...all, policy: tables.methods[all.method].policies.includes(policy) ? policy : "fixed" };
}

function chooseMethod(method) { // a pair that cannot draft with it is replaced
  const { pairs } = tables.methods[method];
  return pairs.includes(settings().pair) || !pairs.includes("bundled") ? {} : { pair: "bundled", chat: false };
}

function chooseDraftModel(copy) {
  const { pair, target, method } = settings();
  const { pairs, uses_model: drafts } = tables.methods[method];
  if (copy) return { drafter: tables.same, drafter_quantization: copy, method: drafts ? method : "draft" };
  const alone = drafts && !target && tables.pairs[pair] && !pairs.includes(pair);
  return { drafter: "", drafter_quantization: "none", method: alone ? tables.pairs[pair].settings.method : method };
}

function preset({ values, link }) {
  const { mode } = settings();
  return { ...values, ...(mode && mode !== "off" ? link : {}) };
}

const gatesKey = (values) => JSON.stringify(PAIR_OPTIONS.map((name) => values[name] ?? ""));

function setGates(calibrated) { // thresholds, remembered for their models; each is sent several times
  if (same(calibrated, latestGates)) return;
  latestGates = calibrated;
  const { models, gates } = calibrated;
  store(GATES_KEY, JSON.stringify({ ...stored(GATES_KEY), [gatesKey(models)]: gates }));
  setSettings(gates);
}

function dependentSettings(field) {
  const name = field.dataset.setting;
  const values = name === "pair" ? choosePair(field.value) : name === "method" ? chooseMethod(field.value) : field.closest("#draft-model") ? chooseDraftModel(field.value) : {};
  return PAIR_OPTIONS.includes(name) ? { ...values, ...stored(GATES_KEY)[gatesKey({ ...settings(), ...values })] } : values;
}

// --- lanes of further settings ---------------------------------------------------------------------------------------

export function storedLanes() { return stored(LANES_KEY).lanes ?? []; }

function storeLanes(lanes) { // { lanes, text }; the same in all tabs
  store(LANES_KEY, JSON.stringify(lanes));
  showLanes();
}

function showLanes() { setText(document.getElementById("kept-lanes"), stored(LANES_KEY).text ?? ""); }

// --- links and storage -----------------------------------------------------------------------------------------------

async function copyLink(button) {
  const url = new URL(location.href), values = settings();
  const required = ["prompt", "compare", ...Object.keys(tables.pairs[values.pair]?.settings ?? {}), "pair"]; // a link's pair sets its own
  for (const [name, value] of Object.entries(values)) {
    if (!required.includes(name) && same(value, defaultSettings[name])) url.searchParams.delete(name);
    else url.searchParams.set(name, typeof value === "string" ? value : JSON.stringify(value));
  }
  const tooLong = url.href.length > MAX_ADDRESS;
  if (tooLong) url.searchParams.delete("prompt");
  history.replaceState(null, "", url);
  const copied = tooLong ? "Copied, without the long prompt" : "Copied";
  button.dataset.label ??= button.textContent;
  button.textContent = await (navigator.clipboard?.writeText(url.href) ?? Promise.reject()).then(() => copied, () => "Copy it from the address bar");
  setTimeout(() => { button.textContent = button.dataset.label; }, 2500);
}

function restore({ settings: restored, lanes }) { // values changed before are kept
  const values = settings();
  const untouched = Object.entries(restored).filter(([name]) => same(values[name], defaultSettings[name]));
  if (untouched.length) setSettings(Object.fromEntries(untouched));
  else showDependent(values);
  storeLanes(lanes);
  document.body.dataset.settings = "restored";
}

export function exampleNamed(title) { // undefined if it is the prompt already, or not offered, as on saved pages
  return examples?.ready.find((example) => example.title === title && example.prompt !== prompt().value);
}

export function applyExample(example) {
  setText(document.getElementById("example-effect"), example.effect);
  setSettings(example);
  trigger("clear"); // another conversation
}

const ACTIONS = {
  reset: () => setSettings(defaultSettings),
  link: () => copyLink(document.getElementById("link")),
  "drop-lanes": () => storeLanes({ lanes: [], text: "" }),
  "at-best": () => applyExample(examples.best[settings().method] ?? {}),
  "at-worst": () => applyExample(examples.worst[settings().method] ?? {}),
  unload: () => trigger("delete"),
  "find-drafter": () => { page("#fit-run").click(); page("#fit").scrollIntoView({ block: "center" }); },
};

const FORM_PARTS = ["#settings-form", "#examples", "#prompt textarea", "#compare input", "#kept-lanes"];

function connectExamples(row, signal) { // one Tab stop; arrow keys move between its buttons
  const chips = [...row.children];
  const select = (chip) => { for (const other of chips) other.tabIndex = other === chip ? 0 : -1; };
  select(chips[0]);
  row.addEventListener("focusin", (e) => select(e.target), { signal });
  row.addEventListener("keydown", (e) => {
    const at = chips.indexOf(e.target);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: chips.length - 1 }[e.key];
    if (next === undefined) return;
    e.preventDefault();
    chips[next]?.focus();
  }, { signal });
}

export async function connectForm() { // Gradio mounts its parts one after another
  const { signal } = listeners;
  while (!FORM_PARTS.every(page)) await new Promise((resolve) => setTimeout(resolve, 16));
  if (signal.aborted) return;
  form = document.getElementById("settings-form");
  tables = JSON.parse(form.dataset.tables);
  examples = JSON.parse(document.getElementById("examples").dataset.examples);
  connectExamples(document.getElementById("examples"), signal);
  defaultSettings = settings();
  form.addEventListener("input", (e) => {
    const target = /** @type {any} */ (e.target);
    if (target.type === "range") target.parentElement.querySelector("[type=number]").value = target.value;
    setSettings(dependentSettings(target));
  }, { signal });
  form.addEventListener("submit", (e) => e.preventDefault(), { signal });
  document.addEventListener("input", (e) => { if (/** @type {Element} */ (e.target).matches("#prompt textarea, #compare input")) changed(); }, { signal });
  document.addEventListener("click", (e) => {
    const button = /** @type {any} */ (/** @type {Element} */ (e.target).closest("button"));
    if (/** @type {Element} */ (e.target).id === "skip") { e.preventDefault(); prompt().focus(); }
    if (button?.dataset.example) applyExample(examples.ready[button.dataset.example]);
    if (button?.dataset.preset) setSettings(preset(tables.presets[button.dataset.preset]));
    if (button && button.id in ACTIONS) ACTIONS[button.id]();
  }, { signal });
  window.addEventListener("storage", showLanes, { signal }); // of another tab
  window.addEventListener("specdemo:restored", () => restore(window.specdemoRestored), { signal });
  if (window.specdemoRestored) restore(window.specdemoRestored);
}

// Functions that Gradio's events call.
window.specdemo = { settings, setSettings, setGates, storeLanes, lanes: storedLanes };
