"""What a head is given after a piece of a prompt, by vLLM's own proposer."""

from types import SimpleNamespace

import pytest
import torch

from outrider.vllm_plugin import register

pytestmark = pytest.mark.vllm

# Three prompts of 10 tokens: one read to its end, and two of which 4 and 7 tokens are read.
ENDS = [10, 4, 7]
SAMPLED = [[5, -1], [6, -1], [7, -1]]


class Request:
    def __init__(self, first: int) -> None:
        self.first = first

    def get_token_id(self, position: int) -> int:
        return self.first + position


def next_token_ids(*, is_upstream: bool = False) -> list[int]:
    from vllm.platforms import current_platform
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.utils import CpuGpuBuffer

    register()
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    prepare = SpecDecodeBaseProposer.prepare_next_token_ids_padded
    if is_upstream:
        prepare = prepare.__wrapped__
    device = torch.device("cpu")
    is_piece = CpuGpuBuffer(3, dtype=torch.bool, device=device, pin_memory=False)
    is_piece.np[:] = [end < 10 for end in ENDS]
    is_piece.copy_to_gpu()
    proposer = SimpleNamespace(
        backup_next_token_ids=CpuGpuBuffer(3, dtype=torch.int32, device=device, pin_memory=False),
        runner=SimpleNamespace(
            optimistic_seq_lens_cpu=torch.tensor(ENDS), discard_request_mask=is_piece
        ),
    )
    batch = SimpleNamespace(
        num_reqs=3, req_ids=["a", "b", "c"], num_tokens_no_spec=[10, 10, 10], vocab_size=1000
    )
    requests = {name: Request(100 * i) for i, name in enumerate(batch.req_ids)}
    sampled = torch.tensor(SAMPLED, dtype=torch.int32)
    found, num_valid = prepare(proposer, sampled, requests, batch, is_piece.gpu)
    assert num_valid.tolist() == [1, 0, 0]
    return found.tolist()  # type: ignore[no-any-return]


def test_the_next_token_of_the_prompt() -> None:
    assert next_token_ids() == [5, 104, 207]


def test_upstream_takes_the_last_one() -> None:
    assert next_token_ids(is_upstream=True) == [5, 109, 209]
