"""A step in which requests sample with top_k and none has drafts."""

import dataclasses

import pytest
import torch
from torch import Tensor

from outrider.vllm_plugin import register
from tests.vllm_plugin.v1_sampler import sampling_metadata, verify

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True, scope="module")
def worker() -> None:
    from vllm.platforms import current_platform

    register()
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def sample(drafts: list[list[int]], draft_probs: Tensor | None) -> Tensor:
    """Two requests whose top_k leaves token 2 alone."""
    metadata = sampling_metadata([1.0, 1.0])
    metadata = dataclasses.replace(metadata, top_k=torch.tensor([1, 1], dtype=torch.int32))
    logits = torch.tensor([0.0, 1.0, 2.0]).repeat(sum(map(len, drafts)) + 2, 1)
    return verify("block", drafts, draft_probs, logits, metadata)


@pytest.mark.parametrize("draft_probs", [None, torch.zeros(0, 3)])
def test_a_step_without_drafts(draft_probs: Tensor | None) -> None:
    assert sample([[], []], draft_probs).tolist() == [[2], [2]]


def test_a_step_with_drafts_has_top_k() -> None:
    laws = torch.tensor([[0.2, 0.2, 0.6], [0.2, 0.2, 0.6]])
    assert sample([[2, 1], []], laws).tolist() == [[2, 2, -1], [2, -1, -1]]


def test_upstream_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import rejection_sampler

    upstream = rejection_sampler.apply_sampling_constraints.__wrapped__
    monkeypatch.setattr(rejection_sampler, "apply_sampling_constraints", upstream)
    with pytest.raises(RuntimeError, match=r"max\(\)"):
        sample([[], []], None)
