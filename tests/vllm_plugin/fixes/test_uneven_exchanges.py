"""Exchanges between ranks with different numbers of rows, over gloo."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from outrider.vllm_plugin import register

pytestmark = pytest.mark.vllm

SIZES = [3, 1]
WIDTH = 4


def rows_of(rank: int) -> Tensor:
    return torch.arange(SIZES[rank] * WIDTH).view(-1, WIDTH).bfloat16() + 100 * rank


def sums_of(rank: int) -> Tensor:
    """What a rank adds to the rows of all ranks."""
    return torch.arange(sum(SIZES) * WIDTH).view(-1, WIDTH).bfloat16() * (rank + 1)


def run_rank(rank: int, store: str, results: Any) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    world_size = len(SIZES)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    group = SimpleNamespace(
        world_size=world_size, rank_in_group=rank, dist_module=dist, device_group=None
    )
    gathered = CpuCommunicator.all_gatherv(group, [rows_of(rank), rows_of(rank)[:, :1]], 0, SIZES)
    even = CpuCommunicator.all_gatherv(group, rows_of(rank)[:1])
    sums = sums_of(rank)
    scattered = CpuCommunicator.reduce_scatterv(group, sums, 0, SIZES)
    halves = CpuCommunicator.reduce_scatterv(group, sums, 0)
    is_kept = torch.equal(sums, sums_of(rank))
    results.put((rank, is_kept, *(x.tolist() for x in (*gathered, even, scattered, halves))))
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    register()
    import vllm.distributed.device_communicators.cpu_communicator  # noqa: F401 - before the fork

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, str(tmp_path / "store"), results))
        for rank in range(len(SIZES))
    ]
    for process in ranks:
        process.start()
    told = sorted(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join()
    everything = torch.cat([rows_of(0), rows_of(1)])
    total = sums_of(0) + sums_of(1)
    starts = [0, SIZES[0]]
    for rank, is_kept, rows, columns, even, scattered, halves in told:
        assert is_kept
        assert rows == everything.tolist()
        assert columns == everything[:, :1].tolist()
        assert even == torch.cat([rows_of(0)[:1], rows_of(1)[:1]]).tolist()
        assert scattered == total[starts[rank] :][: SIZES[rank]].tolist()
        assert halves == total[2 * rank : 2 * rank + 2].tolist()


def test_upstream_has_none() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    register()
    group = SimpleNamespace(world_size=2)
    for name in ("all_gatherv", "reduce_scatterv"):
        with pytest.raises(NotImplementedError):
            getattr(CpuCommunicator, name).__wrapped__(group, rows_of(0), 0, SIZES)
