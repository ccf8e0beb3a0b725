// Gradio's loading indicator keeps a reference to `requestAnimationFrame` and requests frames for ever, 60 per second:
// once the page is mounted, this reference is ignored. Bound references of other modules continue to work.
(() => {
  "use strict";
  const request = window.requestAnimationFrame;
  window.requestAnimationFrame = function (callback) {
    if (this === undefined && window.requestAnimationFrame === request) return 0;
    if (document.querySelector("#cockpit, #lessons")) window.requestAnimationFrame = request;
    return request.call(window, callback);
  };
})();
