"""Studies and measurements cited by docs/; run by hand, not installed."""
