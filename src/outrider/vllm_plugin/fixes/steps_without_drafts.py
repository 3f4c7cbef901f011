"""top_k in a step in which no request has drafts, such as the one that reads a prompt.

vLLM's V1 runner sends such a step through the rejection sampler too, with no row of the target to
judge by, and its top_k asks for the largest of none: a request with top_k ends the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.vllm_plugin.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def obstacle() -> str | None:
    """Triton has a kernel of its own for it."""
    from vllm.triton_utils import HAS_TRITON

    return "Triton's kernel runs" if HAS_TRITON else None


def install() -> None:
    """Leaves no rows as they are."""
    from vllm.v1.sample import rejection_sampler

    replace(rejection_sampler, "apply_sampling_constraints", _of_rows)


def _of_rows(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of_rows(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        if not len(logits):
            return logits
        return apply(logits, cu_num_draft_tokens, sampling_metadata)

    return of_rows
