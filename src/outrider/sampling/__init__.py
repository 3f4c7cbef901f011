"""From logits to token ids: one way to form probabilities, to draw, and to get random numbers."""

from outrider.sampling.compute_probs import SamplingTensors, compute_probs
from outrider.sampling.gumbel_max import sample_with_gumbel
from outrider.sampling.inverse_cdf import sample_from_probs
from outrider.sampling.random_streams import Purpose, gumbel_noise, uniforms

__all__ = [
    "Purpose",
    "SamplingTensors",
    "compute_probs",
    "gumbel_noise",
    "sample_from_probs",
    "sample_with_gumbel",
    "uniforms",
]
