// Attributes that parts of Gradio lack, for keyboards and screen readers.

import { listeners } from "./state.js";

const SCROLLABLE = ":is(#tabs, #estimate, #fit) .md table";

function completeAttributes() {
  for (const part of document.querySelectorAll(SCROLLABLE)) {
    if (part.scrollWidth > part.clientWidth) part.setAttribute("tabindex", "0");
    else part.removeAttribute("tabindex");
  }
  for (const head of document.querySelectorAll("#tabs .virtual-table-viewport th:first-child")) head.setAttribute("tabindex", "0");
  for (const empty of document.querySelectorAll("#tabs .empty[aria-label]")) empty.setAttribute("role", "note");
  for (const icon of document.querySelectorAll("footer img")) icon.setAttribute("alt", "");
}

function completeMessages() { // a button must not contain a button: messages have one that closes them
  for (const head of document.querySelectorAll(".toast-header[role]")) {
    head.removeAttribute("role");
    head.removeAttribute("tabindex");
  }
}

export function observeContents() {
  const contents = new ResizeObserver(completeAttributes), messages = new MutationObserver(completeMessages);
  listeners.signal.addEventListener("abort", () => { contents.disconnect(); messages.disconnect(); });
  for (const part of document.querySelectorAll("#tabs, #estimate, #fit")) contents.observe(part);
  for (const part of document.querySelectorAll(".toast-wrap")) messages.observe(part, { childList: true, subtree: true });
  completeMessages();
  completeAttributes();
}
