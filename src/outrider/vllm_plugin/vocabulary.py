"""Both ends of a model that vLLM drives: the embedding of ids, and the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


class VocabularyModel(nn.Module):
    """A model with an embedding in `model.embed_tokens`, and `lm_head` and `logits_processor`."""

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[T] to [T, C]."""
        embedded: Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """[n, C] to [n, V]; None on a rank that does not gather them."""
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits
