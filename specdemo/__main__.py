"""Entry point of the command `specdemo` and of `python -m specdemo`."""

import os
import signal
import sys

from specdemo import set_environment_defaults


def main() -> int:
    """Set the process-wide environment variables, then run the terminal; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(130))
    set_environment_defaults()  # torch reads the variables when it is imported
    from specdemo.cli import main as run_terminal

    code = run_terminal()
    if code == 130:  # interrupted
        from specdemo.signals import exit_process

        exit_process(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
