"""The parameters of a request at each of its drafts."""

import pytest
import torch
from torch import Tensor

from outrider.vllm_plugin import register

pytestmark = pytest.mark.vllm

COUNTS = torch.tensor([2, 0, 3, 1])
CU_NUM_TOKENS = COUNTS.cumsum(0, dtype=torch.int32)
PARAMETERS = {
    "temperature": torch.tensor([0.5, 1.0, 0.0, 2.0]),
    "top_p": torch.tensor([0.9, 1.0, 0.5, 0.1]),
    "top_k": torch.tensor([3, 7, 0, 5], dtype=torch.int32),
}


def expanded(values: Tensor, implementation: object) -> Tensor:
    output = torch.full((6,), 77, dtype=values.dtype)
    implementation(output, values, CU_NUM_TOKENS, 0, 1)  # type: ignore[operator]
    return output


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_draft_has_its_request_s(name: str) -> None:
    from vllm.utils import cpu_triton_utils

    register()
    values = PARAMETERS[name]
    assert torch.equal(
        expanded(values, cpu_triton_utils._expand_kernel_impl),
        values.where(values != 0, 1).repeat_interleave(COUNTS),
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_upstream_writes_nothing(name: str) -> None:
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    register()
    current_platform.import_kernels()
    upstream = cpu_triton_utils._expand_kernel_impl.__wrapped__
    assert (expanded(PARAMETERS[name], upstream) == 77).all()
