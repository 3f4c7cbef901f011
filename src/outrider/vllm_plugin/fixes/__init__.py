"""Defects of vLLM, one a module; each says which, and a test fails without it."""
