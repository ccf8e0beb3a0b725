// Attributes that parts of Gradio lack: keyboard access to what scrolls, and roles and texts for screen readers.

const SCROLLABLE = ":is(#tabs, #estimate) .md table, #tabs .virtual-table-viewport";

function completeAttributes() {
  for (const part of document.querySelectorAll(SCROLLABLE)) {
    if (part.scrollWidth > part.clientWidth || part.scrollHeight > part.clientHeight) part.setAttribute("tabindex", "0");
    else part.removeAttribute("tabindex");
  }
  for (const empty of document.querySelectorAll("#tabs .empty[aria-label]")) empty.setAttribute("role", "note");
  for (const icon of document.querySelectorAll("footer img")) icon.setAttribute("alt", "");
}

const contents = new ResizeObserver(completeAttributes);
listeners.signal.addEventListener("abort", () => contents.disconnect());

function observeContents() {
  for (const part of document.querySelectorAll("#tabs, #estimate")) contents.observe(part);
  completeAttributes();
}
