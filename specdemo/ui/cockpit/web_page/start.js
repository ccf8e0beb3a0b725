// Shows the run of a saved web page.

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const applyScheme = () => document.body.classList.toggle("dark", darkScheme.matches);
darkScheme.addEventListener("change", applyScheme);
applyScheme();
skipPacing = true;
storedRun.then(({ frame }) => receiveFrame(frame));
