"""See, measure and trust speculative decoding of language models."""
