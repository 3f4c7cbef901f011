"""vLLM's EAGLE proposer for a head that reads the trunk's streams and gives two tensors back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.spec_decode.eagle import EagleProposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HEAD_ARCHITECTURE = "Qwen4ExpMTP"


class Qwen4ExpMTPProposer(EagleProposer):
    """Drafts with the head of Qwen4-Exp, and with any other model as vLLM does.

    Args:
        vllm_config: vLLM's.
        device: where the head lives.
        runner: the model runner.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: object = None
    ) -> None:
        super().__init__(vllm_config, device, runner)
        if self._drafts_by_streams():
            self.hidden_size *= int(self.draft_model_config.hf_text_config.hc_count)
            self.hidden_states = torch.zeros(
                (self.max_num_tokens, self.hidden_size), dtype=self.dtype, device=device
            )

    def _drafts_by_streams(self) -> bool:
        return HEAD_ARCHITECTURE in (self.draft_model_config.hf_config.architectures or ())

    def model_returns_tuple(self) -> bool:
        """Whether the model gives one tensor for the logits and one for the next step."""
        return self._drafts_by_streams() or super().model_returns_tuple()
