(...values) => {
  const names = NAMES, usual = USUAL;
  const url = new URL(location.href);
  names.forEach((name, i) => {
    const text = typeof values[i] === "string" ? values[i] : JSON.stringify(values[i]);
    if (JSON.stringify(values[i]) === JSON.stringify(usual[i])) url.searchParams.delete(name);
    else url.searchParams.set(name, text);
  });
  const long = url.href.length > 8000; // servers refuse what is longer
  if (long) url.searchParams.delete("prompt");
  history.replaceState(null, "", url);
  const button = document.getElementById("link"), label = "Link to these settings";
  const say = (text) => { button.textContent = text; setTimeout(() => { button.textContent = label; }, 2500); };
  const done = long ? "Copied, without the long prompt" : "Copied";
  (navigator.clipboard?.writeText(url.href) ?? Promise.reject()).then(() => say(done), () => say("It is in the address bar"));
}
