"""The rooms that know transformers and bitsandbytes."""
