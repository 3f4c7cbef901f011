"""The call of an autograd function, which torch leaves untyped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`: forward now, backward when the gradient comes."""
    return function.apply(*arguments)
