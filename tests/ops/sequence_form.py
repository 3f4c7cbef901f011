"""Both forms of the differentiable ops: tensor operations in float64, native kernels in float32."""

import shutil
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from outrider.ops import native
from tests.tolerances import assert_near

HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))


@pytest.fixture(params=["tensor operations", "native kernels"])
def form(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The dtype in which the op under test runs in the form of the parameter."""
    if request.param == "tensor operations":
        yield torch.float64
        return
    if not HAS_COMPILER:
        pytest.skip("no C++ compiler to build the native kernels with")
    native.enable()
    yield torch.float32
    native.disable()


def assert_same_gradients(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    form: torch.dtype,
    factor: float = 10.0,
) -> None:
    """Output and gradients of a function against those of its reference in float64.

    Args:
        function: of the inputs, in the dtype of `form`.
        reference: the same law.
        inputs: float64.
        form: see the fixture.
        factor: of the tolerance.
    """
    weight = None
    results = []
    for tested, dtype in ((reference, torch.float64), (function, form)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        output = tested(*leaves)
        if weight is None:
            weight = torch.randn_like(output)
        (output * weight.to(dtype)).sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*results, strict=True):
        assert actual is not None
        assert expected is not None
        assert actual.dtype == form
        scale = max(1.0, float(expected.abs().max()))
        assert_near(actual / scale, expected.to(form) / scale, factor)
