({ names, defaults }, saved, ...values) => {
  const restored = JSON.parse(saved || "{}");
  const untouched = (i) => JSON.stringify(values[i]) === JSON.stringify(defaults[i]); // keep values changed before the page was restored
  document.body.dataset.settings = "restored";
  for (const name of ["chat", "pair"]) document.body.dataset[name] = restored[name] ?? values[names.indexOf(name)];
  return names.map((name, i) => (name in restored && untouched(i) ? restored[name] : undefined)); // undefined: unchanged
}
