"""Outrider."""
