"""Command `serve`: the service in this process, or with Ray Serve."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable
from contextlib import closing

from specdemo.cli.service import build_service, check_options, warn_without_token
from specdemo.core.errors import UserError
from specdemo.remote.connections import ConnectionLimits
from specdemo.remote.listener import bind
from specdemo.remote.serve import listen


def serve_pair(options: argparse.Namespace) -> int:
    """Serve until a signal arrives, and return the exit code."""
    check_options(options)
    run = _serve_with_ray if options.ray else _serve_here
    return run(options)


def _serve_here(options: argparse.Namespace) -> int:
    with closing(bind(options.host, options.port)) as listener:
        port = listener.getsockname()[1]
        app = build_service(options, f"{socket.gethostname()}:{port}")
        warn_without_token(options)
        scheme = "https" if options.certificate else "http"
        line = f"listening on {scheme}://{options.host}:{port}"
        listen(
            app,
            listener,
            options.certificate,
            options.key,
            sys.stdin.buffer if options.until_stdin_ends else None,
            announce=lambda: print(line, flush=True),
            connections=ConnectionLimits(options.connections, options.client_connections),
            drain_s=options.drain_s,
        )
    return 0


def _serve_with_ray(options: argparse.Namespace) -> int:
    try:
        from specdemo.cli import ray_serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise UserError("package ray is not installed: install ray[serve], or omit --ray") from error
    serve_until_signal: Callable[[argparse.Namespace], int] = ray_serve.serve_until_signal
    return serve_until_signal(options)
