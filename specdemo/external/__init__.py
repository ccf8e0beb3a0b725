"""Statistics of speculative decoding that other engines report."""
