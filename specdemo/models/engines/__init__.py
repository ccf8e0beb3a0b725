"""Forward passes over a KV cache: a class per kind of model."""
