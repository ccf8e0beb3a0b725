"""OpenAI-compatible endpoint of the service: chat and text completions with speculative decoding."""
