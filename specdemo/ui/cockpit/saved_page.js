// A saved web page: it contains the last frame of the run, with all records, compressed.

import { mountDisplay } from "./display.js";
import { receiveFrame } from "./run.js";
import { current } from "./state.js";

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const applyScheme = () => document.body.classList.toggle("dark", darkScheme.matches);
darkScheme.addEventListener("change", applyScheme);
applyScheme();
mountDisplay({ element: document.querySelector("main"), trigger: () => {} });
current.skipPacing = true;
const bytes = Uint8Array.from(atob(document.getElementById("run-data").textContent), (c) => c.charCodeAt(0));
new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json().then(receiveFrame);
