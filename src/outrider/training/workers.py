"""Threads that share the windows of a step, each on a core of its own.

A step is thousands of small operations. Where the threads of an operation meet after each of them,
as torch's own do, two cores wait for each other much of the time, and all the more where another
process has one of them. Here they meet once a step, and a window is the work of one core.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from outrider.training.objective import Losses


class Workers:
    """Computes the gradient of a batch, in one thread or in several.

    The result depends on how many there are, and not on which of them is done first: what each has
    computed is added up in the order of their windows.

    Args:
        num_workers: with 1 the thread that asks does the work, with as many threads as torch has.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool = None
        if num_workers > 1:
            self._pool = ThreadPoolExecutor(
                num_workers, "training", initializer=torch.set_num_threads, initargs=(1,)
            )

    def backward(
        self,
        parameters: Sequence[nn.Parameter],
        losses_of: Callable[[Tensor], Losses],
        window: Tensor,
    ) -> Losses:
        """Sets the gradients of the parameters to those of the mean loss over the workers.

        Every loss but the routers' balance, which is of a share of the batch then, is the same
        mean over the batch whatever the number of workers.

        Args:
            parameters: whose gradients are set; None for one that takes no part.
            losses_of: the losses of windows; called from several threads at once.
            window: [B, T+2] int64, B a multiple of the number of workers.

        Returns:
            The losses, detached: the mean over the workers.
        """
        if self._pool is None:
            losses = losses_of(window)
            for parameter in parameters:
                parameter.grad = None
            losses.total.backward()
            return _detached(losses)

        def work(windows: Tensor) -> tuple[Losses, Sequence[Tensor | None]]:
            losses = losses_of(windows)
            share = losses.total / self._num_workers
            gradients = torch.autograd.grad(share, parameters, allow_unused=True)
            return _detached(losses), gradients

        results = list(self._pool.map(work, window.chunk(self._num_workers)))
        for parameter, *parts in zip(parameters, *(one for _, one in results), strict=True):
            given = [part for part in parts if part is not None]
            parameter.grad = given[0] if given else None
            for part in given[1:]:
                parameter.grad += part
        return _mean([losses for losses, _ in results])


def _detached(losses: Losses) -> Losses:
    return replace(
        losses,
        total=losses.total.detach(),
        trunk=losses.trunk.detach(),
        depths=[loss.detach() for loss in losses.depths],
        router_balance=losses.router_balance.detach(),
        mtp_router_balance=losses.mtp_router_balance.detach(),
        index=losses.index.detach(),
    )


def _mean(all_losses: list[Losses]) -> Losses:
    def mean(values: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(values)).mean()

    return replace(
        all_losses[0],
        total=mean([losses.total for losses in all_losses]),
        trunk=mean([losses.trunk for losses in all_losses]),
        depths=[mean(values) for values in zip(*(one.depths for one in all_losses), strict=True)],
        router_balance=mean([losses.router_balance for losses in all_losses]),
        mtp_router_balance=mean([losses.mtp_router_balance for losses in all_losses]),
        index=mean([losses.index for losses in all_losses]),
    )
