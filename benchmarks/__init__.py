"""Studies cited by the documents in docs/. Run one with `python benchmarks/NAME.py` or `python -m benchmarks.NAME`."""
