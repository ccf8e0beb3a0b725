// Switches of the display, stored between visits.

import { setText } from "./elements.js";
import { placeAllGuesses } from "./guesses.js";
import { $ } from "./state.js";
import { readStored, store } from "./storage.js";

const COLOUR_WORDS = { accepted: ["green", "blue"], rejected: ["red", "orange"], correction: ["blue", "yellow"], bonus: ["pale blue", "pale yellow"] };

function storedSwitch(id, key, apply) {
  const box = $(id);
  const stored = readStored(key);
  if (stored !== null) box.checked = stored === "yes";
  const change = () => { apply(box.checked); placeAllGuesses(); store(key, box.checked ? "yes" : "no"); };
  box.addEventListener("change", change);
  apply(box.checked);
}

export function connectSwitches() {
  storedSwitch("#show-rejected", "specdemo-show-rejected", (on) => $(".cockpit").classList.toggle("only-kept", !on));
  storedSwitch("#inline-guesses", "specdemo-inline-guesses", (on) => $(".cockpit").classList.toggle("inline", on));
  storedSwitch("#safe-colours", "specdemo-safe-colours", (on) => {
    $(".cockpit").classList.toggle("safe", on);
    for (const [kind, words] of Object.entries(COLOUR_WORDS)) setText($(`[data-legend=${kind}]`), words[Number(on)]);
  });
}
