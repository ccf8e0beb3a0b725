// Tooltip of the token under the pointer or the keyboard focus.

import { make } from "./elements.js";
import { inspectStep, revealStep } from "./inspector.js";
import { $, lanes, tokenData } from "./state.js";
import { decisionRows, explain, KIND_WORDS } from "./steps.js";

function showTooltip(span) {
  hideTooltip();
  const { token: { kind, text, id, why, decision }, record: { l, step } } = tokenData.get(span);
  const rows = [["token", `${JSON.stringify(text)} · id ${id}`], ["step", String(step.i)]];
  if (step.remote?.rows) rows.push(["round trips", String(1 + step.remote.rows)]);
  if (decision.p !== null) rows.push(...decisionRows(decision));
  const tip = $("#tip");
  const { by, fate } = span.parentElement.dataset, { head } = lanes[l];
  const heading = by ? [KIND_WORDS.unverified, fate !== "open" && fate].filter(Boolean).join(", ") : KIND_WORDS[kind];
  const list = make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]));
  tip.dataset.kind = kind;
  tip.replaceChildren(make("strong", { text: heading }), list, make("p", { text: [explain(head, why, decision), head.fates[fate]].filter(Boolean).join(" ") }));
  tip.hidden = false;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const below = at.bottom + 8 + size.height < window.innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, window.innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - size.height - 8)}px`;
  span.parentElement.classList.add("mates");
  span.setAttribute("aria-describedby", "tip");
}

export function hideTooltip() {
  if ($("#tip").hidden) return; // avoids a search of the page per scroll event
  $("#tip").hidden = true;
  $(".mates")?.classList.remove("mates");
  $("[aria-describedby]")?.removeAttribute("aria-describedby");
}

export function resetTooltip() {
  hideTooltip();
  quietUntil = 0;
}

function moveFocus(lane, key) { // a lane is one Tab stop; arrow keys move between its tokens
  const shown = [...lane.querySelectorAll(".tok")].filter((span) => span.checkVisibility({ visibilityProperty: true }));
  if (!shown.length) return false;
  const here = shown.indexOf(document.activeElement);
  const next = { ArrowRight: here + 1, ArrowLeft: here < 0 ? shown.length - 1 : here - 1, Home: 0, End: shown.length - 1 }[key];
  if (next === undefined) return false;
  const span = shown[Math.max(0, Math.min(next, shown.length - 1))];
  span.tabIndex = -1;
  span.focus();
  return true;
}

const QUIET_MS = 800; // after a click: the text may move below the pointer

let quietUntil = 0;

export function connectTooltip() {
  for (const [name, { lane }] of Object.entries(lanes)) {
    const inspect = (span) => {
      inspectStep(name, tokenData.get(span).record.step.i);
      quietUntil = performance.now() + QUIET_MS;
      hideTooltip();
      if (!$("#inspector").hidden) revealStep(span);
    };
    const leave = () => { // text that moves below a resting pointer must not hide the tip of the focused token
      const focused = lane.querySelector(".tok:focus");
      if (!focused) hideTooltip();
      else if (!$("#tip").hidden) showTooltip(focused);
    };
    lane.addEventListener("pointerover", (e) => { const span = e.target.closest(".tok"); span && performance.now() > quietUntil ? showTooltip(span) : leave(); });
    lane.addEventListener("pointerleave", leave);
    lane.addEventListener("scroll", () => { if (!lane.contains(document.activeElement)) hideTooltip(); });
    lane.addEventListener("focusin", (e) => { if (e.target.matches(".tok")) showTooltip(e.target); });
    lane.addEventListener("focusout", hideTooltip);
    lane.addEventListener("click", (e) => { const span = e.target.closest(".tok"); if (span && getSelection().isCollapsed) inspect(span); });
    lane.addEventListener("keydown", (e) => {
      if (e.ctrlKey || e.metaKey || e.altKey) return;
      if (e.key === "Enter" && e.target.matches(".tok")) {
        inspect(e.target);
        $("#player").focus({ preventScroll: true });
      } else if (!moveFocus(lane, e.key)) return;
      e.preventDefault();
    });
  }
}
