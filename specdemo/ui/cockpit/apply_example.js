({ effect, values, examples }, method, ...current) => {
  document.getElementById("example-effect").textContent = effect;
  return values ?? examples[method] ?? current;
}
