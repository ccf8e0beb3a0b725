"""Ways to draft, one file each. They know core and nothing else."""
