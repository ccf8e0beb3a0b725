// A run as a web page that needs no server: the page without a run, which the server offers, and the run as compressed JSON.

import { current, lanes } from "./state.js";

const SETTINGS = ["temperature", "top_k", "top_p", "seed", "max_tokens", "rule", "policy"];
const DIGITS = 6; // significant digits of numbers; the page shows 3 decimals

export async function savedPage() { // undefined if the request fails
  const response = await fetch(new URL("saved_page.html", import.meta.url)).catch(() => null);
  if (!response?.ok) return undefined;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const { head, header } = lanes[current.frame.plan.find((name) => lanes[name].head)];
  const heading = [head.title, head.model].filter(Boolean).join(", ");
  page.title = `specdemo: ${heading}`;
  page.querySelector("h1").textContent = `Speculative decoding: ${heading}`;
  page.querySelector(".about").textContent = `Recorded with specdemo: ${settingsOf(header.recipe)}. Click a token to see its step.`;
  page.getElementById("run-data").textContent = await compressed({ ...current.frame, at: 0, r: current.records });
  return `<!doctype html>\n${page.documentElement.outerHTML}\n`;
}

function settingsOf(recipe) {
  const known = SETTINGS.filter((name) => (recipe[name] ?? null) !== null);
  return known.map((name) => `${name.replaceAll("_", " ")} ${recipe[name]}`).join(", ");
}

async function compressed(data) { // gzip in base64
  const shorter = (_, value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(DIGITS)) : value);
  const stream = new Blob([JSON.stringify(data, shorter)]).stream().pipeThrough(new CompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}
