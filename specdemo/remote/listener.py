"""Listening sockets."""

from __future__ import annotations

import socket

from specdemo.core.errors import UserError


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket; port 0 selects a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # lets asyncio disable Nagle
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"cannot listen on {host}:{port} ({error}): choose another --port or --host") from error
    return listener
