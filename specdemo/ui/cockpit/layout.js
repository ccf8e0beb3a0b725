// Layout of the page: the sidebar of the settings, and the moment at which the mounted page becomes visible.

import { observeContents } from "./attributes.js";
import { markButtons } from "./run.js";
import { current, listeners, trigger } from "./state.js";

const REVEAL_FRAMES = 3, REVEAL_TIMEOUT_MS = 4000, CONTENT_TIMEOUT_MS = 1500;
const narrow = matchMedia("(max-width: 768px)");

export function connectLayout(content) { // `content`: promise of the first run
  if (narrow.matches) fitSidebar();
  narrow.addEventListener("change", fitSidebar, { signal: listeners.signal });
  Promise.race([content, new Promise((resolve) => setTimeout(resolve, CONTENT_TIMEOUT_MS))]).finally(reveal); // a slow server does not hide the page
}

function fitSidebar() { // it would cover a narrow page, and a wide one has no button to open it
  trigger(narrow.matches ? "collapse" : "expand");
}

function reveal() { // when all parts are mounted and have their size
  const began = performance.now();
  let height = 0, stable = 0;
  const check = () => {
    const mounted = ["settings", "examples", "prompt", "run", "tabs"].every((id) => document.getElementById(id)) && "settings" in document.body.dataset && !current.drawing && !(narrow.matches && document.querySelector("#settings.open"));
    const now = document.documentElement.scrollHeight;
    stable = mounted && now === height ? stable + 1 : 0;
    height = now;
    if (stable >= REVEAL_FRAMES || performance.now() - began > REVEAL_TIMEOUT_MS) {
      document.body.dataset.shown = "yes";
      observeContents();
      markButtons(); // a resumed run began before they were mounted
    } else setTimeout(check, 16); // hidden tabs receive no animation frames
  };
  check();
}
