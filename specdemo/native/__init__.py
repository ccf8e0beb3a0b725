"""C code for CPUs: passes and sampling."""
