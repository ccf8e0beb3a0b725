"""Run `make run` until the page answers, then interrupt it: `python3 open_page.py [PORT]`, in the program's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from urllib.error import HTTPError
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
    answers = [answer(f"http://127.0.0.1:{port}{path}") for path in PATHS]
    os.killpg(program.pid, signal.SIGINT)
    rest = program.communicate(timeout=60)[0]
    end = "a traceback" if "Traceback" in rest else "no traceback"
    print(f"{', '.join(map(' '.join, zip(PATHS, answers, strict=True)))}; {end} after SIGINT")
    return int(set(answers) != {"200"} or "Traceback" in rest)


def answer(url: str, attempts: int = 10) -> str:
    """Return the status, with the cause of a failure; a page that loads its models is requested again."""
    try:
        with urlopen(url, timeout=120) as response:
            return str(response.status)
    except HTTPError as error:
        if error.code == 503 and attempts > 1:
            return answer(url, attempts - 1)
        return f"{error.code} {error.read(200).decode(errors='replace')}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
