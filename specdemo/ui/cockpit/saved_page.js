// A saved web page: the run is in the page, compressed, and replaces the server.

import { mountDisplay } from "./display.js";
import { receiveFrame } from "./run.js";
import { current } from "./state.js";

export const storedRun = readStored();

async function readStored() {
  const bytes = Uint8Array.from(atob(document.getElementById("run-data").textContent.trim()), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function stored(select) { return JSON.stringify(select(await storedRun) ?? null); }

/** @type {any} */
const server = { round: ([, lane, i]) => stored((run) => run.steps[lane][i]), figures: ([, lane]) => stored((run) => run.figures[lane]) };

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const applyScheme = () => document.body.classList.toggle("dark", darkScheme.matches);
darkScheme.addEventListener("change", applyScheme);
applyScheme();
mountDisplay({ element: document.querySelector("main"), server, trigger: () => {} });
current.skipPacing = true;
storedRun.then(({ frame }) => receiveFrame(frame));
