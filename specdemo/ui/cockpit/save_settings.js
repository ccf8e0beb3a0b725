({ names }, ...values) => {
  const url = new URL(location.href); // settings from a link no longer apply after a change
  names.forEach((name) => url.searchParams.delete(name));
  if (url.href !== location.href) history.replaceState(null, "", url);
  if (document.body.dataset.estimate) document.body.dataset.estimate = "outdated";
  for (const name of ["chat", "pair"]) document.body.dataset[name] = values[names.indexOf(name)];
  return [Object.fromEntries(names.map((name, i) => [name, values[i]]))];
}
