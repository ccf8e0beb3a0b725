({ names, defaults, pairSettings }, ...values) => {
  const url = new URL(location.href);
  const isDefault = (i) => JSON.stringify(values[i]) === JSON.stringify(defaults[i]);
  const required = ["pair", "prompt", "compare", ...pairSettings]; // a link's pair sets its own
  names.forEach((name, i) => {
    const text = typeof values[i] === "string" ? values[i] : JSON.stringify(values[i]);
    if (!required.includes(name) && isDefault(i)) url.searchParams.delete(name);
    else url.searchParams.set(name, text);
  });
  const tooLong = url.href.length > 8000; // common limit of servers
  if (tooLong) url.searchParams.delete("prompt");
  history.replaceState(null, "", url);
  const button = document.getElementById("link"), label = "Link to these settings";
  const show = (text) => { button.textContent = text; setTimeout(() => { button.textContent = label; }, 2500); };
  const done = tooLong ? "Copied, without the long prompt" : "Copied";
  (navigator.clipboard?.writeText(url.href) ?? Promise.reject()).then(() => show(done), () => show("Copy it from the address bar"));
}
