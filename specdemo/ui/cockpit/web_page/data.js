// Replaces the server in a saved web page: the run is in the page, compressed.

const element = document.querySelector("main");
const props = { value: null, max_trace: 0 };
const server = { round: ([, lane, i]) => stored((run) => run.steps[lane][i]), figures: ([, lane]) => stored((run) => run.figures[lane]) };
const storedRun = readStored();

async function readStored() {
  const bytes = Uint8Array.from(atob(document.getElementById("run-data").textContent.trim()), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function stored(select) { return JSON.stringify(select(await storedRun) ?? null); }
