"""From logits to token ids: one way to form probabilities, to draw, and to get random numbers."""

from outrider.sampling.compute_probs import SamplingTensors, compute_logprobs, compute_probs
from outrider.sampling.gumbel_max import sample_with_gumbel
from outrider.sampling.inverse_cdf import sample_from_probs
from outrider.sampling.logits_processors import (
    LogitsProcessors,
    RowProcessors,
    process_logits,
    uses_processors,
)
from outrider.sampling.logprob_report import LogprobReport, num_reported, raw_logprobs
from outrider.sampling.processed_rows import TextSoFar
from outrider.sampling.random_streams import Purpose, gumbel_noise, uniforms

__all__ = [
    "LogitsProcessors",
    "LogprobReport",
    "Purpose",
    "RowProcessors",
    "SamplingTensors",
    "TextSoFar",
    "compute_logprobs",
    "compute_probs",
    "gumbel_noise",
    "num_reported",
    "process_logits",
    "raw_logprobs",
    "sample_from_probs",
    "sample_with_gumbel",
    "uniforms",
    "uses_processors",
]
