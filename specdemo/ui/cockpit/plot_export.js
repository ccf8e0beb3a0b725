// SVG files of plots: a copy with the styles of the page, which needs no style sheet.

import { make, SVG, svg } from "./elements.js";
import { $, listeners } from "./state.js";

const COPIED_STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "text-anchor", "vector-effect", "stroke-linecap"];

const TEXT_LINE = 22;

function standaloneSvg(pictures, captions, keys = []) { // stacked from top to bottom; `keys`: [colour, text]
  const boxes = pictures.map((picture) => picture.getBoundingClientRect());
  const width = Math.max(...boxes.map((box) => box.width)), gap = 8;
  const file = svg("svg", { xmlns: SVG, width, height: boxes.reduce((sum, box) => sum + box.height + gap, (captions.filter(Boolean).length + keys.length) * TEXT_LINE) });
  file.append(svg("rect", { width: "100%", height: "100%", fill: getComputedStyle($(".cockpit")).getPropertyValue("--paper") }));
  const { color, fontFamily } = getComputedStyle($(".cockpit"));
  const write = (x, top, text) => file.append(svg("text", { x, y: top + 15, fill: color, "font-size": 13, "font-family": fontFamily, text }));
  let y = 0;
  for (const [i, picture] of pictures.entries()) {
    if (captions[i]) { write(4, y, captions[i]); y += TEXT_LINE; }
    const copy = picture.cloneNode(true);
    const copies = [copy, ...copy.querySelectorAll("*")];
    for (const [k, original] of [picture, ...picture.querySelectorAll("*")].entries()) {
      const style = getComputedStyle(original);
      for (const name of COPIED_STYLES) copies[k].style.setProperty(name, style.getPropertyValue(name));
    }
    for (const [name, value] of Object.entries({ x: 0, y, width: boxes[i].width, height: boxes[i].height })) copy.setAttribute(name, value);
    file.append(copy);
    y += boxes[i].height + gap;
  }
  for (const [fill, text] of keys) {
    file.append(svg("rect", { x: 4, y: y + 5, width: 10, height: 10, fill }));
    write(19, y, text);
    y += TEXT_LINE;
  }
  return new XMLSerializer().serializeToString(file);
}

function rowText(row) { return [...(row?.children ?? [])].map((part) => part.textContent).filter(Boolean).join(" "); }

function captionOf(button) { return button.closest("figure")?.querySelector("figcaption").firstChild.textContent.trim() ?? ""; }

export function download(text, name, type) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Save the plot named by a button of the cockpit, or the chart around a button of a tab. */
function savePlot(button) {
  const plot = document.getElementById(button.dataset.plot ?? button.closest("chart-view[id], .block").id), pictures = [...plot.querySelectorAll("svg")];
  if (!pictures.length) return;
  const captions = pictures.map((picture) => rowText(picture.closest(".time-row")) || captionOf(button));
  const keys = [...plot.querySelectorAll(".key span")].map((span) => [getComputedStyle(span, "::before").backgroundColor, span.textContent]);
  const text = standaloneSvg(pictures, captions, keys), name = `specdemo-${plot.id}`;
  if (button.dataset.save === "png") savePng(text, `${name}.png`);
  else download(text, `${name}.svg`, "image/svg+xml");
}

export function connectPlotExport() {
  document.addEventListener("click", (e) => {
    const button = /** @type {Element} */ (e.target).closest("[data-plot], [data-save]");
    if (button) savePlot(button);
  }, { signal: listeners.signal });
}

export async function savePng(text, name) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
  await image.decode();
  const picture = document.createElement("canvas");
  const scale = 2;
  picture.width = image.width * scale;
  picture.height = image.height * scale;
  picture.getContext("2d").drawImage(image, 0, 0, picture.width, picture.height);
  picture.toBlob((blob) => download(blob, name, "image/png"));
}
