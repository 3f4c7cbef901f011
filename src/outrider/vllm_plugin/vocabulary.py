"""Both ends of a model that vLLM drives: the embedding of ids, and the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


class VocabularyModel(nn.Module):
    """A model with an embedding and a vocabulary head, which a subclass builds.

    Attributes:
        model: its layers, with the embedding `embed_tokens`.
        lm_head: the vocabulary head, or what stands for it on a rank that has none.
        logits_processor: calls the head and gathers what it gives.
    """

    model: Any
    lm_head: Any
    logits_processor: Any

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[T] to [T, C]."""
        embedded: Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """[n, C] to [n, V]; None on a rank that does not gather them."""
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits
