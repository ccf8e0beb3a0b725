// The frames of a run over a socket, which spares the thread that decodes. Where there is none they come through gradio.

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
