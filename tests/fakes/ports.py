"""Ports for servers of tests."""

import socket


def free_port() -> int:
    """Return a port that the system chose, so that test processes do not choose the same."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
