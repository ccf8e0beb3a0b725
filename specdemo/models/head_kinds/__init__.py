"""Kinds of head checkpoints; each has a file and an entry in `models/heads.py`."""
