(...values) => {
  const names = NAMES;
  const url = new URL(location.href); // a link has done its work once something is changed
  names.forEach((name) => url.searchParams.delete(name));
  if (url.href !== location.href) history.replaceState(null, "", url);
  return [Object.fromEntries(names.map((name, i) => [name, values[i]]))];
}
