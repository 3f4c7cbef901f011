"""Structured outputs: what may follow in a text that has to be of a grammar."""
