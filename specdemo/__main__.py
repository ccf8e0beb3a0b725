"""Entry point of `python -m specdemo`."""

import sys

from specdemo import set_environment_defaults

if __name__ == "__main__":
    set_environment_defaults()  # before torch is imported
    from specdemo.cli import main

    sys.exit(main())
