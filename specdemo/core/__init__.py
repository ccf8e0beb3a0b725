"""Token ids in, steps out: the loop and its parts. Never imports transformers or gradio."""
