"""Golden tests: external names and recorded traces that must survive any restructuring of the code."""
