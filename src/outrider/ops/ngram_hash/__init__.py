"""Hashed n-grams: which table rows a position reads."""

from outrider.ops.ngram_hash.hash import ngram_rows
from outrider.ops.ngram_hash.naive import ngram_rows_naive

__all__ = ["ngram_rows", "ngram_rows_naive"]
