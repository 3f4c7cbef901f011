"""Windows of any length through vLLM's delta net on the CPU: each row sees the rows before it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, normalize, pad, silu, softplus

from outrider.vllm_plugin import register

pytestmark = pytest.mark.vllm

TAPS, NUM_DRAFTS, CHANNELS = 4, 3, 5
COLUMNS = TAPS - 1 + NUM_DRAFTS
WEIGHT = torch.randn(CHANNELS, 1, TAPS, generator=torch.Generator().manual_seed(1))
# Rows of a window, and how many of them are kept.
WINDOWS = [(4, 2), (2, 2), (4, 4), (1, 1), (3, 2), (3, 3), (4, 1), (2, 1), (2, 2), (4, 3)]


class Layer:
    """As much of a delta net as its convolution needs; keeps what comes out of it."""

    def __init__(self) -> None:
        self.conv1d = SimpleNamespace(weight=WEIGHT, bias=None)
        self.activation, self.A_log, self.dt_bias = "silu", None, None
        self.mixed: Tensor | None = None

    def rearrange_mixed_qkv(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.mixed = mixed
        return mixed[None], mixed[None], mixed[None]


def decode(forward: Any, num_requests: int) -> tuple[list[Tensor], list[Tensor]]:
    """Runs the windows for requests in one batch, each a window ahead of the one before it.

    Returns:
        Of every request's windows, one after another: what came out, and what is right.
    """
    generator = torch.Generator().manual_seed(2)
    slots = torch.full((num_requests, CHANNELS, COLUMNS), torch.nan)
    slots[..., : TAPS - 1] = 0
    texts = [torch.zeros(0, CHANNELS) for _ in range(num_requests)]
    kept, found, right = [1] * num_requests, [], []
    for step in range(len(WINDOWS)):
        plans = [WINDOWS[(step + i) % len(WINDOWS)] for i in range(num_requests)]
        rows = [torch.randn(length, CHANNELS, generator=generator) for length, _ in plans]
        layer = Layer()
        metadata = SimpleNamespace(
            num_spec_decodes=num_requests,
            spec_query_start_loc=torch.tensor([0, *(len(r) for r in rows)]).cumsum(0),
            spec_state_indices_tensor=torch.arange(num_requests)[:, None],
            num_accepted_tokens=torch.tensor(kept),
        )
        flat = torch.cat(rows)
        forward(layer, metadata, flat, None, None, slots, None, TAPS, COLUMNS)
        assert layer.mixed is not None
        found.extend(layer.mixed.split([len(r) for r in rows]))
        for i, (own, (length, num_kept)) in enumerate(zip(rows, plans, strict=True)):
            whole = torch.cat([texts[i], own])
            columns = pad(whole.T[None], (TAPS - 1, 0))
            right.append(silu(conv1d(columns, WEIGHT, groups=CHANNELS))[0].T[-length:])
            texts[i] = torch.cat([texts[i], own[:num_kept]])
        kept = [num_kept for _, num_kept in plans]
    return found, right


@pytest.fixture
def without_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm._custom_ops as ops

    register()
    name = "fused_sigmoid_gating_delta_rule_update_spec_cpu"
    monkeypatch.setattr(ops, name, lambda **_: None)


@pytest.mark.usefixtures("without_recurrence")
@pytest.mark.parametrize("num_requests", [1, 3])
def test_windows_of_any_length(num_requests: int) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    for found, right in zip(*decode(gdn_attention._spec_forward, num_requests), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.usefixtures("without_recurrence")
def test_upstream_reads_the_wrong_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    upstream = gdn_attention._spec_forward.__wrapped__
    monkeypatch.setattr(f"{__name__}.WINDOWS", [(4, 1), (2, 1), (4, 1)])
    found, right = decode(upstream, 1)
    torch.testing.assert_close(found[:2], right[:2])
    # The columns that it takes for those before the window are not even the request's.
    assert not torch.allclose(found[2], right[2], equal_nan=True)


@pytest.mark.usefixtures("without_recurrence")
def test_whole_windows_stay_with_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from outrider.vllm_plugin.fixes import short_windows

    def never(*_: object) -> Tensor:
        raise AssertionError("a whole window came here")

    monkeypatch.setattr(short_windows, "convolve", never)
    monkeypatch.setattr(f"{__name__}.WINDOWS", [(4, 2), (4, 4), (4, 1)])
    for found, right in zip(*decode(gdn_attention._spec_forward, 2), strict=True):
        torch.testing.assert_close(found, right)


HEADS, HEAD_DIM = 2, 32


class HeadLayer:
    """As much of a delta net as its recurrence needs: queries, keys and values side by side."""

    A_log = torch.tensor([0.1, -0.3])
    dt_bias = torch.tensor([0.25, 0.5]).bfloat16()

    def rearrange_mixed_qkv(self, mixed: Tensor) -> list[Tensor]:
        parts = mixed.unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(1)
        return [part.contiguous()[None] for part in parts]


def delta_rule(mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """[T, H, D] float32 of T rows of a text, one after another (arXiv:2412.06464, equation 10)."""
    state, read = torch.zeros(HEADS, HEAD_DIM, HEAD_DIM), []
    for row, a_row, b_row in zip(mixed.float(), a.float(), b.float(), strict=True):
        query, key, value = row.unflatten(-1, (3, HEADS, HEAD_DIM))
        query, key = normalize(query, dim=-1) * HEAD_DIM**-0.5, normalize(key, dim=-1)
        decay = (-HeadLayer.A_log.exp() * softplus(a_row + HeadLayer.dt_bias)).exp()
        state = state * decay[:, None, None]
        written = (value - (key[:, None] @ state)[:, 0]) * b_row.sigmoid()[:, None]
        state = state + key[:, :, None] * written[:, None]
        read.append((query[:, None] @ state)[:, 0])
    return torch.stack(read)


def test_the_recurrence_goes_on_from_the_last_row_that_was_kept() -> None:
    """Rows 0 to 2, of which 0 and 1 are kept, and then 3 and 4, by vLLM's kernel."""
    from vllm.platforms import current_platform

    from outrider.vllm_plugin.fixes.short_windows import _recur

    current_platform.import_kernels()
    generator = torch.Generator().manual_seed(0)
    mixed, a, b = (
        torch.randn(5, width, generator=generator).bfloat16()
        for width in (3 * HEADS * HEAD_DIM, HEADS, HEADS)
    )
    states = torch.zeros(2 + NUM_DRAFTS, HEADS, HEAD_DIM, HEAD_DIM)
    slots = torch.arange(1, 2 + NUM_DRAFTS, dtype=torch.int32)[None]

    def window(rows: slice, num_kept: int) -> Tensor:
        own = mixed[rows]
        starts, kept = torch.tensor([0, len(own)]), torch.tensor([num_kept], dtype=torch.int32)
        return _recur(HeadLayer(), own, b[rows], a[rows], states, starts, slots, kept).float()

    first, second = window(slice(0, 3), 1), window(slice(3, 5), 2)
    kept = [0, 1, 3, 4]
    # Outputs in bfloat16 are off by up to 2**-9 of their value, which is at most 0.07.
    tolerance = {"atol": 3e-4, "rtol": 0.0}
    torch.testing.assert_close(first, delta_rule(mixed[:3], a[:3], b[:3]), **tolerance)
    torch.testing.assert_close(second, delta_rule(mixed[kept], a[kept], b[kept])[2:], **tolerance)
