"""Training of draft heads on conversations written by their target: `python -m training.head`; docs/heads.md."""
