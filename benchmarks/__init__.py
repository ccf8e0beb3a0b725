"""Studies cited by the documents in docs/. Run: `python -m benchmarks.NAME`."""

from specdemo import set_environment_defaults

set_environment_defaults()  # before torch is imported
