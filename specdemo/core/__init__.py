"""Token ids in, steps out: the loop and what it is made of. Never imports transformers or gradio."""
