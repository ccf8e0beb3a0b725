// The rest of the page: its buttons, its keys, files that come and go, and what is remembered between visits.

const before = window.specdemoListeners;
before?.abort(); // gradio may mount this component again
const listeners = (window.specdemoListeners = new AbortController());
const always = { capture: true, signal: listeners.signal };

document.addEventListener("click", (e) => {
  if (e.target.closest("#stop")) return stop();
  if (!e.target.closest("#run")) return;
  if (busy) { e.stopImmediatePropagation(); e.preventDefault(); return; }
  press();
}, always);

document.addEventListener("keydown", (e) => {
  if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) {
    e.preventDefault();
    e.stopImmediatePropagation(); // to a focused checkbox, Enter would mean something else
    document.getElementById("run").click();
  }
  if (e.key === "Escape" && !e.target.closest?.("[aria-expanded=true]")) { hideTip(); pause(); stop(); } // there it closes a list
}, always);

window.addEventListener("specdemo:failed", () => {
  if (busy) over("failed", "failed: the server did not take the run; try again");
}, { signal: listeners.signal });

window.addEventListener("resize", spark, { signal: listeners.signal });

function remembered(id, key, apply) { // a switch that stays as it was left
  const box = $(id);
  const kept = localStorage.getItem(key);
  if (kept !== null) box.checked = kept === "yes";
  const change = () => { apply(box.checked); localStorage.setItem(key, box.checked ? "yes" : "no"); };
  box.addEventListener("change", change);
  apply(box.checked);
}

remembered("#show-rejected", "specdemo-show-rejected", (on) => $(".cockpit").classList.toggle("only-kept", !on));
remembered("#safe-colours", "specdemo-safe-colours", (on) => $(".cockpit").classList.toggle("safe", on));

function save(text, name, type) {
  if (!text) return say("failed", "the server no longer holds this run: run it again");
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

for (const [name, { lane }] of Object.entries(lanes)) {
  const kept = () => [...lane.querySelectorAll(".given, .tok")].filter((s) => !NOT_KEPT.has(s.dataset.kind)).map((s) => s.textContent).join("");
  $(`#copy-${name}`).addEventListener("click", async (e) => {
    const said = await navigator.clipboard.writeText(kept()).then(() => "Copied", () => "Not allowed");
    setText(e.target, said);
    setTimeout(() => setText(e.target, "Copy text"), 1500);
  });
  $(`#trace-${name}`).addEventListener("click", async () => save(await server.trace([run, name]), `specdemo-${name}.jsonl`, "application/x-ndjson"));
  $(`#csv-${name}`).addEventListener("click", async () => save(await server.csv([run, name]), `specdemo-${name}.csv`, "text/csv"));
  $(`#svg-${name}`).addEventListener("click", async () => save(await server.svg([run, name]), `specdemo-${name}.svg`, "image/svg+xml"));
}
$("#save-all").addEventListener("click", async () => save(await server.trace([run, "all"]), "specdemo.jsonl", "application/x-ndjson"));

const LARGEST = 32e6; // bytes of a file, as on the server

async function openTrace(ask) {
  if (busy) return say("failed", "a run is going on: stop it, then open the trace");
  let text;
  try {
    text = await ask();
  } catch {
    return over("failed", "failed: the file cannot be read as text");
  }
  if (typeof text !== "string") return over("failed", "failed: the server cannot be reached");
  const frame = JSON.parse(text);
  if (frame.refused) return over("failed", `failed: ${frame.refused}`);
  take(frame);
}

$("#open-trace").addEventListener("click", () => $("#trace-file").click());
$("#trace-file").addEventListener("change", (e) => {
  const [file] = e.target.files;
  e.target.value = ""; // the same file may be opened again
  if (!file) return;
  if (file.size > LARGEST) return over("failed", `failed: ${file.name} has ${(file.size / 1e6).toFixed(0)} MB: ${LARGEST / 1e6} are the most that can be shown`);
  openTrace(async () => server.import_trace(await file.text()));
});
server.recorded("").then((names) => {
  $("#recorded").replaceChildren(...(names ? JSON.parse(names) : []).map(([name, title]) => {
    const button = make("button", { type: "button", class: "small", text: title });
    button.addEventListener("click", () => openTrace(() => server.recorded(name)));
    return button;
  }));
});

if (window.innerWidth < 769) { // gradio's sidebar comes some time after this, opens, and would cover a narrow page
  let calm = 0;
  const fold = () => {
    const handle = document.querySelector("#settings.open > button");
    handle?.click();
    calm = handle || !document.getElementById("settings") ? 0 : calm + 1;
    if (calm < 20 && !listeners.signal.aborted) requestAnimationFrame(fold);
  };
  fold();
}

window.windDown?.(); // the start page's spinner
const clock = setInterval(tick, 100);
listeners.signal.addEventListener("abort", () => clearInterval(clock));
markButtons();
watch("value", () => { if (props.value) take(JSON.parse(props.value)); });
