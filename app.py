"""Builds the page and launches it. `python app.py --help` lists the choices."""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys
import webbrowser

from specdemo import limit_onednn_cache

PORT = 7860
HERE = ("127.0.0.1", "localhost", "::1")  # hosts that only this machine's browsers reach
PROXIES = "127.0.0.1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16"  # whose word about a visitor's address a Space takes


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="See, measure and trust speculative decoding, in the browser.")
    host, port = os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"), os.environ.get("GRADIO_SERVER_PORT")
    parser.add_argument("--host", default=host, help="address to listen on (default: this machine only)")
    parser.add_argument(
        "--port", type=int, default=port, help=f"port to listen on (default: {PORT}, or the next one that is free)"
    )
    parser.add_argument("--pair", help="drafter and target to begin with (default: the first that is offered)")
    parser.add_argument("--device", default="auto", help="where the models run: auto, cpu, cuda, mps")
    parser.add_argument("--share", action="store_true", help="also open a public tunnel; off by default")
    parser.add_argument(
        "--browser",
        action=argparse.BooleanOptionalAction,
        default=has_display(),
        help="open the page in a browser (default: if there seems to be a display)",
    )
    parser.add_argument("--window", action="store_true", help="open the page in a window of its own (needs pywebview)")
    parser.add_argument(
        "--zero-gpu",
        action=argparse.BooleanOptionalAction,
        default=os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true"),
        help="run in processes that are lent a GPU each (default: on a ZeroGPU Space)",
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

    if "SPACE_ID" in os.environ:
        os.environ.setdefault("FORWARDED_ALLOW_IPS", PROXIES)

    limit_onednn_cache()  # before torch is imported
    # imported late: these take seconds, and the arguments are checked first
    from specdemo.core.errors import UserError
    from specdemo.ui import desktop_window as window
    from specdemo.ui import zero_gpu as zero
    from specdemo.ui.limits import read_limits
    from specdemo.ui.page import build, launch_options
    from specdemo.ui.service import leave_a_core

    if args.host in HERE and not args.share:
        leave_a_core()
    try:
        limits = read_limits(os.environ)
        lent = zero.hosted(limits, args.device) if args.zero_gpu else {}
        page = build(pair=args.pair, device=args.device, limits=limits, **lent)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    _, local, public = page.launch(
        server_name=args.host,
        server_port=port,
        share=args.share,
        inbrowser=args.browser and not args.window,
        prevent_thread_lock=True,
        **launch_options(page),
    )
    gc.freeze()  # half a million objects that are here to stay: to go over them again stops every thread for 0.4 s
    print(f"specdemo is ready: {public or local}  (Ctrl+C ends it)", flush=True)
    try:
        if args.window:
            missing = window.show(local) if has_display() else "there is no display here"
            if missing is None:
                return 0
            print(f"No window: {missing}. The page is in the browser instead.", file=sys.stderr, flush=True)
            if args.browser:
                webbrowser.open(local)
        page.block_thread()
    finally:
        page.worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
