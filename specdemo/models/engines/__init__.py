"""Forward passes over a KV cache, one class per kind of model."""
