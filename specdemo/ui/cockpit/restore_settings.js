(saved, ...values) => {
  const names = NAMES, usual = USUAL, restored = JSON.parse(saved || "{}");
  const untouched = (i) => JSON.stringify(values[i]) === JSON.stringify(usual[i]); // keep values changed before the page was restored
  document.body.dataset.settings = "restored";
  return names.map((name, i) => (name in restored && untouched(i) ? restored[name] : undefined)); // undefined: unchanged
}
