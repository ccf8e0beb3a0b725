"""C code for forward passes and sampling on CPUs, and its Python interface."""
