"""An end for the spinner of gradio's start page, which runs for as long as the page is open.

gradio 6.31 takes the spinner off the page but leaves its clock running: at the rate of the screen, also while nothing
runs, it has the browser look the page over. Nothing reaches that clock from outside, so a script that comes before
gradio's own stands between the page and `requestAnimationFrame`; once the page is up, it winds the clock down. Where
gradio stops it by itself nothing happens. Knows the server, nothing of gradio.
"""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

END = b"</head>"
SCRIPT = b"<script>" + (Path(__file__).parent / "still.js").read_bytes() + b"</script>"


class Still:
    """Serves the page with the script in its head; everything else is passed on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hold the page back until all of it is there, for its length changes."""
        if scope["type"] != "http" or scope["path"] != "/":
            return await self._app(scope, receive, send)
        start: Message = {}
        body = b""

        async def once_whole(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            body = body.replace(END, SCRIPT + END, 1)
            MutableHeaders(scope=start)["content-length"] = str(len(body))
            await send(start)
            await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, once_whole)
