"""Builds the page and launches it. `python app.py --help` lists the choices."""

from __future__ import annotations

import argparse
import os
import socket
import sys

PORT = 7860


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="See, measure and trust speculative decoding, in the browser.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, help=f"port to listen on (default: {PORT}, or the next one that is free)")
    parser.add_argument("--pair", help="drafter and target to begin with (default: the first that is offered)")
    parser.add_argument("--device", default="auto", help="where the models run: auto, cpu, cuda, mps")
    parser.add_argument("--share", action="store_true", help="also open a public tunnel; off by default")
    parser.add_argument(
        "--browser",
        action=argparse.BooleanOptionalAction,
        default=has_display(),
        help="open the page in a browser (default: if there seems to be a display)",
    )
    return parser


def has_display() -> bool:
    """Whether a browser window would probably be seen by whoever started this."""
    if os.environ.get("SSH_CONNECTION") or os.environ.get("CI"):
        return False
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def is_free(host: str, port: int) -> bool:
    """Whether the port can be had."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((host, port))
        except OSError:
            return False
    return True


def choose_port(host: str, asked: int | None) -> int | None:
    """The port asked for, else the usual one or the next that is free; None if it cannot be had."""
    if asked is not None:
        return asked if is_free(host, asked) else None
    return next((port for port in range(PORT, PORT + 100) if is_free(host, port)), None)


def main(argv: list[str] | None = None) -> int:
    """Build and serve until interrupted. Exit code 2: the request cannot be met."""
    args = options().parse_args(argv)
    port = choose_port(args.host, args.port)
    if port is None:
        which = f"Port {args.port}" if args.port is not None else f"Every port from {PORT} to {PORT + 99}"
        print(f"{which} on {args.host} cannot be had: choose another with --port.", file=sys.stderr)
        return 2
    if port != PORT and args.port is None:
        print(f"Port {PORT} is in use, so the page is on port {port}.", flush=True)

    from specdemo.core.errors import Refused
    from specdemo.ui.page import build, launch_options  # seconds of imports: not before the arguments are known good

    try:
        page = build(pair=args.pair, device=args.device)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    _, local, public = page.launch(
        server_name=args.host,
        server_port=port,
        share=args.share,
        inbrowser=args.browser,
        prevent_thread_lock=True,
        **launch_options(),
    )
    print(f"specdemo is ready: {public or local}  (Ctrl+C ends it)", flush=True)
    try:
        page.block_thread()
    finally:
        page.worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
