// SVG files of plots: a copy with the styles of the page, which needs no style sheet.

const COPIED_STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "text-anchor", "vector-effect"];

function standaloneSvg(pictures) { // stacked from top to bottom
  const boxes = pictures.map((picture) => picture.getBoundingClientRect());
  const width = Math.max(...boxes.map((box) => box.width)), gap = 8;
  const file = svg("svg", { xmlns: SVG, width, height: boxes.reduce((sum, box) => sum + box.height + gap, 0) });
  file.append(svg("rect", { width: "100%", height: "100%", fill: getComputedStyle($(".cockpit")).getPropertyValue("--paper") }));
  let y = 0;
  for (const [i, picture] of pictures.entries()) {
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
  return new XMLSerializer().serializeToString(file);
}

function download(text, name, type) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

for (const button of element.querySelectorAll("[data-plot]")) {
  button.addEventListener("click", () => {
    const pictures = [...$(`#${button.dataset.plot}`).querySelectorAll("svg")];
    if (pictures.length) download(standaloneSvg(pictures), `specdemo-${button.dataset.plot}.svg`, "image/svg+xml");
  });
}
