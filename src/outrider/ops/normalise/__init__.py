"""Normalisation of rows with a gradient of its own, for training."""

from outrider.ops.normalise.naive import gated_rms_rows_naive, rms_rows_naive, unit_rows_naive
from outrider.ops.normalise.sequence import gated_rms_rows, rms_rows, unit_rows

__all__ = [
    "gated_rms_rows",
    "gated_rms_rows_naive",
    "rms_rows",
    "rms_rows_naive",
    "unit_rows",
    "unit_rows_naive",
]
