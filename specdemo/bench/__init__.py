"""Paired benchmarks of recipes x prompts, alternating in a process."""
