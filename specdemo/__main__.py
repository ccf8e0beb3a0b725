"""Entry point of `python -m specdemo`."""

import sys

from specdemo import limit_onednn_cache

if __name__ == "__main__":
    limit_onednn_cache()  # before torch is imported
    from specdemo.cli import main

    sys.exit(main())
