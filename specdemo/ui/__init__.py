"""The page: what a run looks like. Only `page.py` knows gradio; `frames.py` is plain Python."""
