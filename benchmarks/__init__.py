"""Studies and measurements cited by docs/; run by hand, not installed."""

from specdemo import limit_onednn_cache

limit_onednn_cache()  # before torch is imported
