"""Compiled code for CPUs: the forward pass, and sampling."""
