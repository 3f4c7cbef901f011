"""Data parallelism of experts on the CPU: ranks with different numbers of tokens exchange them.

vLLM's communicator for the CPU chooses the exchange by `all_gatherv` and `reduce_scatterv`, and has
neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from outrider.vllm_plugin.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def obstacle() -> str | None:
    """Communicators of accelerators have both."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else "this platform's communicator has both"


def install() -> None:
    """Gives the communicator the two exchanges that its base class only names."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    replace(CpuCommunicator, "all_gatherv", _gathering)
    replace(CpuCommunicator, "reduce_scatterv", _scattering)


def _gathering(_: Callable[..., Any]) -> Callable[..., Any]:
    def gathering(
        self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor | list[Tensor]:
        if isinstance(input_, list):
            return [gather_rows(self, one, dim, sizes) for one in input_]
        return gather_rows(self, input_, dim, sizes)

    return gathering


def _scattering(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scattering(
        self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Tensor:
        sizes = sizes or [input_.shape[dim] // self.world_size] * self.world_size
        total = input_.clone(memory_format=torch.contiguous_format)
        self.dist_module.all_reduce(total, group=self.device_group)
        start = sum(sizes[: self.rank_in_group])
        return total.narrow(dim, start, sizes[self.rank_in_group]).contiguous()

    return scattering


def gather_rows(communicator: Any, rows: Tensor, dim: int, sizes: list[int] | None) -> Tensor:
    """The rows of all ranks, one rank's after another's.

    Args:
        communicator: vLLM's, of a group of ranks.
        rows: this rank's, `sizes[rank]` along `dim`.
        dim: 0, the only one that is asked for.
        sizes: rows of each rank; None where they are equal.
    """
    assert dim == 0, "rows are gathered along their first dimension"
    world_size = communicator.world_size
    if world_size == 1:
        return rows
    most = len(rows) if sizes is None else max(sizes)
    padded = pad(rows, (0, 0) * (rows.dim() - 1) + (0, most - len(rows))).contiguous()
    gathered = padded.new_empty(world_size * most, *rows.shape[1:])
    communicator.dist_module.all_gather_into_tensor(
        gathered, padded, group=communicator.device_group
    )
    if sizes is None:
        return gathered
    parts = gathered.split(most)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
