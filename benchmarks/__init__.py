"""Studies cited by the documents in docs/. Run: `python benchmarks/NAME.py` or `python -m benchmarks.NAME`."""
