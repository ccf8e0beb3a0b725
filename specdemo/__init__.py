"""See, measure and trust speculative decoding of language models."""

import os

# oneDNN keeps what it has compiled for a product of so many rows, half a megabyte each, and there are as many numbers
# of rows as lengths of prompts: by itself it would keep a thousand of them, twice. Read when torch is imported.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "128")
