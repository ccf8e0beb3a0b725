"""Loading and running models; the only package that imports transformers and bitsandbytes."""
