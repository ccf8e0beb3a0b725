"""Run `make run` until the page answers, then interrupt it: `python3 open_page.py [PORT]`, in the program's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from urllib.request import urlopen

PATHS = ("/", "/health", "/lessons")


def main(port: str = "7999") -> int:
    """Return 0 if all paths answer and the page ends without a traceback."""
    program = subprocess.Popen(
        ["make", "run", f"ARGS=--port {port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    for line in program.stdout:
        lines.append(line)
        if line.startswith("specdemo is ready"):
            break
    else:
        print("".join(lines[-30:]))
        return program.wait() or 1
    statuses = []
    for path in PATHS:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as response:
            statuses.append(f"{path} {response.status}")
    os.killpg(program.pid, signal.SIGINT)
    rest = program.communicate(timeout=60)[0]
    print(f"page: {', '.join(statuses)}; no traceback after SIGINT")
    return int("Traceback" in rest)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
