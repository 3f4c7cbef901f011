"""How weights are divided among the ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear

from outrider.errors import OutriderError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor


def check_divisible(name: str, count: int, tp_size: int) -> None:
    """An error that names the field if its heads cannot be divided among the ranks."""
    if count % tp_size:
        raise OutriderError(f"{name} {count} cannot be divided by tensor_parallel_size {tp_size}")


def check_shared(name: str, count: int, tp_size: int) -> None:
    """An error that names the field if its heads can be neither divided nor shared evenly."""
    if count % tp_size and tp_size % count:
        raise OutriderError(
            f"tensor_parallel_size {tp_size} is neither a divisor nor a multiple of {name} {count}"
        )


def rows_loader(sizes: Sequence[int]) -> Callable[[torch.nn.Parameter, Tensor], None]:
    """A loader that takes this rank's share of each of several groups of rows.

    Args:
        sizes: rows of each group in the checkpoint.
    """

    def load(param: torch.nn.Parameter, loaded: Tensor) -> None:
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        start = 0
        for group, size in zip(loaded.split(list(sizes)), sizes, strict=True):
            share = size // ranks
            param.data[start : start + share].copy_(group[rank * share : (rank + 1) * share])
            start += share

    return load


class KeyValueLinear(ColumnParallelLinear):
    """Projection to key or value heads, each of which several ranks share if there are few.

    Args:
        hidden_size: C.
        num_heads: of the whole model.
        head_dim: D.
        options: for vLLM's layer.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, **options: object) -> None:
        ranks = get_tensor_model_parallel_world_size()
        self.copies = max(1, ranks // num_heads)
        self.head_dim = head_dim
        super().__init__(
            hidden_size,
            num_heads * self.copies * head_dim,
            bias=False,
            return_bias=False,
            **options,
        )

    def _repeated(self, loaded: Tensor) -> Tensor:
        """Each head as often as ranks hold it."""
        heads = loaded.unflatten(0, (-1, self.head_dim))
        return heads.repeat_interleave(self.copies, dim=0).flatten(0, 1)

    def weight_loader(self, param: torch.nn.Parameter, loaded_weight: Tensor) -> None:
        """Loads this rank's heads."""
        super().weight_loader(param, self._repeated(loaded_weight))

    def weight_loader_v2(self, param: torch.nn.Parameter, loaded_weight: Tensor) -> None:
        """Loads this rank's heads into a parameter of vLLM's newer kind."""
        super().weight_loader_v2(param, self._repeated(loaded_weight))
