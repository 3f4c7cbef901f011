"""States at block boundaries, moved by the launches of vLLM's runner."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.vllm_plugin import register

pytestmark = pytest.mark.vllm

BLOCK_SIZE, NUM_DRAFTS, NUM_BLOCKS, TAPS = 4, 2, 40, 4
COLUMNS = TAPS - 1 + NUM_DRAFTS


class Cache:
    """Two groups: convolutions in both, matrices in the first. Channels first or last."""

    def __init__(self, channels: str, num_requests: int = 3) -> None:
        shape = (COLUMNS, 6) if channels == "last" else (6, COLUMNS)
        generator = torch.Generator().manual_seed(3)
        self.slide = 0 if channels == "last" else 1
        # Pages are wider than what lies in them, as those that layers of different kinds share.
        page = torch.randn(NUM_BLOCKS, 64, generator=generator)
        self.matrices = page[:, :24].view(NUM_BLOCKS, 4, 6)
        self.convs = [torch.randn(NUM_BLOCKS, *shape, generator=generator).half() for _ in "ab"]
        blocks = torch.randperm(NUM_BLOCKS - 1, generator=generator).int() + 1
        self.tables = [
            blocks[group * 18 : group * 18 + 18].view(num_requests, 6).clone() for group in (0, 1)
        ]
        self.context = self._context()

    def _context(self) -> Any:
        states = [self.convs[0], self.matrices, self.convs[1]]
        is_conv = [True, False, True]
        is_first = self.slide == 1
        return SimpleNamespace(
            is_initialized=True,
            block_size=BLOCK_SIZE,
            num_states=3,
            num_accepted_tokens_out=torch.zeros(8, dtype=torch.int32),
            block_table_ptrs=torch.tensor([table.data_ptr() for table in self.tables]),
            block_table_stride_req=6,
            state_base_addrs=torch.tensor([state.data_ptr() for state in states]),
            state_block_strides=torch.tensor(
                [state.stride(0) * state.element_size() for state in states]
            ),
            state_elem_sizes=torch.tensor([state.element_size() for state in states]),
            state_inner_sizes=torch.tensor(
                [(1 if is_first else 6) if conv else 24 for conv in is_conv]
            ),
            state_conv_widths=torch.tensor([COLUMNS if conv else 0 for conv in is_conv]),
            state_group_indices=torch.tensor([0, 0, 1]),
            state_dim_row_count=torch.tensor([6 if conv and is_first else 0 for conv in is_conv]),
            state_dim_row_stride=torch.tensor(
                [COLUMNS * 2 if conv and is_first else 0 for conv in is_conv]
            ),
        )

    def expect(self, request: int, source: int, target: int, bias: int) -> list[Tensor]:
        """The states in the target's blocks after a copy: columns that are left, a matrix."""
        expected = []
        for conv, table in zip(self.convs, self.tables, strict=True):
            columns = conv[table[request, source].long()]
            expected.append(columns.narrow(self.slide, bias, COLUMNS - bias).clone())
        return [*expected, self.matrices[self.tables[0][request, source + bias].long()].clone()]

    def read(self, request: int, target: int, bias: int) -> list[Tensor]:
        found = [
            conv[table[request, target].long()].narrow(self.slide, 0, COLUMNS - bias)
            for conv, table in zip(self.convs, self.tables, strict=True)
        ]
        return [*found, self.matrices[self.tables[0][request, target].long()]]


def numbers(*values: int) -> Tensor:
    return torch.tensor([*values, 99, 99], dtype=torch.int32)


@pytest.fixture(autouse=True)
def hooks() -> None:
    register()


@pytest.mark.parametrize("channels", ["first", "last"])
def test_before_a_step(channels: str) -> None:
    """The first request is fresh, the second stays in its block, the third goes on two further."""
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    cache = Cache(channels)
    expected = cache.expect(2, source=1, target=3, bias=1)
    before = [tensor.clone() for tensor in (*cache.convs, cache.matrices)]
    MambaSpecDecodeGPUContext.run_fused_precopy(
        cache.context,
        num_reqs=3,
        state_idx_gpu=numbers(0, 1, 3),
        src_col_gpu=numbers(-1, 1, 1),
        token_bias_gpu=numbers(0, 2, 1),
        idx_mapping=None,
    )
    for found, right in zip(cache.read(2, target=3, bias=1), expected, strict=True):
        assert torch.equal(found, right)
    num_changed = [
        int((after != old).flatten(1).any(1).sum())
        for after, old in zip((*cache.convs, cache.matrices), before, strict=True)
    ]
    assert num_changed == [1, 1, 1]


@pytest.mark.parametrize("channels", ["first", "last"])
def test_after_a_step(channels: str) -> None:
    """A boundary that is not reached, one in the block before, one in the very block."""
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    cache = Cache(channels)
    # Computed, scheduled with two drafts, kept. The first request has tokens up to 4 + 1 + 1 = 6.
    # The second passes 8 with its second row (6 + 1, 8, 9), and goes on in the third block. The
    # third ends at 4 with its last row (1 + 1, 3, 4), and goes on in the first block.
    expected = [
        cache.expect(1, source=2, target=1, bias=1),
        cache.expect(2, source=0, target=0, bias=2),
    ]
    MambaSpecDecodeGPUContext.run_fused_postprocess(
        cache.context,
        num_reqs=3,
        num_accepted_tokens_gpu=numbers(2, 3, 3),
        mamba_state_idx_gpu=numbers(1, 2, 0),
        num_scheduled_tokens_gpu=numbers(3, 3, 3),
        num_computed_tokens_gpu=numbers(4, 6, 1),
        num_draft_tokens_gpu=numbers(2, 2, 2),
    )
    found = [cache.read(1, target=1, bias=1), cache.read(2, target=0, bias=2)]
    for one, right in zip(chain(*found), chain(*expected), strict=True):
        assert torch.equal(one, right)
    assert cache.context.num_accepted_tokens_out[:3].tolist() == [2, 3, 1]


def test_upstream_has_no_kernel_for_it() -> None:
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    upstream = MambaSpecDecodeGPUContext.run_fused_precopy.__wrapped__
    with pytest.raises(TypeError):
        upstream(
            Cache("last").context,
            num_reqs=1,
            state_idx_gpu=numbers(1),
            src_col_gpu=numbers(0),
            token_bias_gpu=numbers(0),
            idx_mapping=None,
        )
