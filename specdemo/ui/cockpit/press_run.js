({ names, turn }, lanes, ...values) => {
  const settings = Object.fromEntries(names.map((name, i) => [name, values[i]]));
  window.dispatchEvent(new CustomEvent("specdemo:run", { detail: { settings, lanes, turn } }));
}
