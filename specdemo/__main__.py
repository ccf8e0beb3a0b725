"""Entry point of `python -m specdemo`."""

import sys

from specdemo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
