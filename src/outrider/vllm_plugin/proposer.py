"""vLLM's EAGLE proposer with a head that reads the trunk's streams and gives two tensors back.

The methods of its own classes are replaced, not a class: vLLM asks for the class by name, and
proposers of other heads are derived from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outrider.vllm_plugin.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_ARCHITECTURE = "Qwen4ExpMTP"


def install() -> None:
    """Lets the proposer draft with the head of Qwen4-Exp, and with any other as before."""
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    replace(EagleProposer, "__init__", _with_streams)
    replace(SpecDecodeBaseProposer, "model_returns_tuple", _or_of_streams)


def _with_streams(init: Callable[..., None]) -> Callable[..., None]:
    def with_streams(self: Any, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        """Widens the buffer of what the head reads to all streams."""
        init(self, vllm_config, device, runner)
        if _drafts_by_streams(self):
            self.hidden_size *= int(self.draft_model_config.hf_text_config.hc_count)
            self.hidden_states = torch.zeros(
                (self.max_num_tokens, self.hidden_size), dtype=self.dtype, device=device
            )

    return with_streams


def _or_of_streams(returns_tuple: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def or_of_streams(self: Any) -> bool:
        """Whether the model gives one tensor for the logits and one for the next step."""
        return _drafts_by_streams(self) or returns_tuple(self)

    return or_of_streams


def _drafts_by_streams(proposer: Any) -> bool:
    return HEAD_ARCHITECTURE in (proposer.draft_model_config.hf_config.architectures or ())
