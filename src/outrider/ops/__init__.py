"""Tensor functions without parameters or state, each beside its naive reference."""
