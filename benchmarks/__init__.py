"""Studies cited by the documents in docs/. Run: `python benchmarks/NAME.py` or `python -m benchmarks.NAME`."""

from specdemo import limit_onednn_cache, load_sequentially

limit_onednn_cache()  # before torch is imported
load_sequentially()
