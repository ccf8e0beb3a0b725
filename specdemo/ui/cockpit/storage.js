// Values of the visitor between visits. Where the browser refuses storage, as in frames of other sites, they last as
// long as the page.

const refused = new Map();

/** @param {"localStorage" | "sessionStorage"} area */
export function readStored(key, area = "localStorage") {
  try {
    return window[area].getItem(key);
  } catch {
    return refused.get(key) ?? null;
  }
}

/** @param {"localStorage" | "sessionStorage"} area */
export function store(key, value, area = "localStorage") {
  try {
    window[area].setItem(key, value);
  } catch {
    refused.set(key, value);
  }
}
