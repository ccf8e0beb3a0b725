// Frames of a run over a WebSocket, which costs the decoding thread less than gradio events (the fallback).

let socket = null;

function listen(id) {
  hangUp();
  const root = `${window.gradio_config?.root ?? location.origin}/`;
  socket = new WebSocket(new URL(`frames/${id}`, root).href.replace(/^http/, "ws"));
  socket.onmessage = ({ data }) => take(JSON.parse(data));
}

function hangUp() {
  socket?.close();
  socket = null;
}
