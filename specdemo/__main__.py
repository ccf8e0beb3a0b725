"""Entry point of `python -m specdemo`."""

import sys

from specdemo import limit_onednn_cache, load_sequentially

if __name__ == "__main__":
    limit_onednn_cache()  # before torch is imported
    load_sequentially()
    from specdemo.cli import main

    sys.exit(main())
