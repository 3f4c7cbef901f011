"""Temperature, top_k and top_p of a request, repeated for each of its drafts, on the CPU.

vLLM's function in place of its Triton kernel writes into a copy of an output that is not int64.
Temperatures are not: the target's logits at drafted positions are then divided by whatever the
memory held, so that the text of a sampled request follows no law.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.vllm_plugin.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def obstacle() -> str | None:
    """Elsewhere the kernel itself runs, as it does on a CPU that Triton knows."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return None if current_platform.is_cpu() and not HAS_TRITON else "Triton's kernel runs"


def install() -> None:
    """Replaces the function before a worker registers it for the kernel."""
    from vllm.utils import cpu_triton_utils

    replace(cpu_triton_utils, "_expand_kernel_impl", _in_place)


def _in_place(_: Callable[..., None]) -> Callable[..., None]:
    def in_place(
        output: Tensor,
        input_val: Tensor,
        cu_num_tokens: Tensor,
        replace_from: int,
        replace_to: int,
        MAX_NUM_TOKENS: int | None = None,  # noqa: ARG001 - of the kernel's signature
    ) -> None:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        values = input_val.where(input_val != replace_from, replace_to)
        output.copy_(values.repeat_interleave(counts, output_size=len(output)))

    return in_place
