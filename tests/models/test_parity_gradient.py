"""The gradient of the next-token loss, against that of transformers, for every parameter."""

import pytest
import torch
import torch.nn.functional as F

from outrider.models.qwen4_exp.decoder_layer import SequenceOptions
from tests.models.parity import CONFIGS, parity_model, random_ids, recorded_margins, reference_model
from tests.models.parity import is_clear as clear_rows
from tests.ops.sequence_form import form

__all__ = ["form"]

# Relative to a parameter's norm. Measured: 2e-5 at the most.
TOLERANCE = 5e-4
LENGTH = 45


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter(name: str, form: torch.dtype) -> None:
    """Float32 in both forms; the loss counts rows that no near-tie can have changed."""
    model = parity_model(name)
    reference = reference_model(model)
    ids = random_ids(2, LENGTH, model.config.eos_token_id or 0)
    with recorded_margins((2, LENGTH)) as margins:
        streams = model.model.forward_sequence(ids, SequenceOptions()).streams
        logits = model.lm_head(model.output_rows(streams))
    counted = clear_rows(margins)[:, :-1]
    assert counted.float().mean() > 0.9
    gradients = []
    for one in (logits, reference(ids, use_cache=False).logits):
        F.cross_entropy(one[:, :-1][counted], ids[:, 1:][counted]).backward()
        owner = model if one is logits else reference
        gradients.append({name: p.grad for name, p in owner.named_parameters()})
    actual, expected = gradients
    assert form in (torch.float32, torch.float64)
    for parameter_name, gradient in expected.items():
        own = actual[parameter_name]
        if gradient is None:
            # No gradient reaches an indexer through its choice of blocks.
            assert "indexer" in parameter_name
            assert own is None
            continue
        assert own is not None, parameter_name
        error = (own - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < TOLERANCE, parameter_name
