"""The token that a head reads at the last row of a piece of a prompt.

Row p of a head takes the token of position p + 1. Where a prompt is read in pieces vLLM's proposers
give the last row of each piece the last token of the whole prompt instead. The row stays in the
head's cache, and the drafts of the request are the worse for it, at each piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.vllm_plugin.patching import own_part_of_platform, replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def obstacle() -> str | None:
    """Platforms that are plugins themselves, such as Ascend, bring their own model runner."""
    return own_part_of_platform("model runner")


def install() -> None:
    """Corrects the tokens where the proposers form them."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    replace(SpecDecodeBaseProposer, "__init__", _keeping_runner)
    replace(SpecDecodeBaseProposer, "prepare_next_token_ids_padded", _after_pieces)


def _keeping_runner(init: Callable[..., None]) -> Callable[..., None]:
    def keeping_runner(
        self: Any,
        vllm_config: Any,
        device: Any,
        pass_hidden_states_to_model: bool,
        runner: Any = None,
    ) -> None:
        init(self, vllm_config, device, pass_hidden_states_to_model, runner)
        self.runner = runner

    return keeping_runner


def _after_pieces(
    prepare: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    def after_pieces(
        self: Any, sampled_token_ids: Tensor, requests: dict[str, Any], batch: Any, is_piece: Tensor
    ) -> tuple[Tensor, Tensor]:
        next_token_ids, num_valid = prepare(self, sampled_token_ids, requests, batch, is_piece)
        runner = self.runner
        ends = runner.optimistic_seq_lens_cpu
        for index in runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist():
            request = requests[batch.req_ids[index]]
            next_token_ids[index] = request.get_token_id(int(ends[index]))
        return next_token_ids, num_valid

    return after_pieces
