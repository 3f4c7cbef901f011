"""One layer on vLLM: n-gram embedding, a sequence mixer and the experts, in gated residuals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from vllm.model_executor.models.qwen3_next import Qwen3NextSparseMoeBlock

from outrider.models.qwen4_exp.config import LINEAR_ATTENTION, Qwen4ExpConfig
from outrider.models.qwen4_exp.hyper_connection import HyperConnection
from outrider.vllm_plugin.gated_delta_net import ParallelGatedDeltaNet
from outrider.vllm_plugin.ngram_embedding import ParallelNgramEmbedding
from outrider.vllm_plugin.norm import widen_norms
from outrider.vllm_plugin.sparse_attention import ParallelSparseAttention

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from outrider.layers.rotary import RotaryEmbedding
    from outrider.models.qwen4_exp.sparse_attention import Angles


class ParallelDecoderLayer(nn.Module):
    """A layer of the trunk or of the head.

    Args:
        config: the model's configuration.
        layer_type: "linear_attention" or "indexed_attention".
        rotary: the model's rotary table.
        vllm_config: vLLM's.
        prefix: the layer's name.
        ple_index: rank among the layers with n-gram embeddings, or None.
    """

    def __init__(
        self,
        config: Qwen4ExpConfig,
        layer_type: str,
        rotary: RotaryEmbedding,
        vllm_config: VllmConfig,
        prefix: str,
        ple_index: int | None = None,
    ) -> None:
        super().__init__()
        self.is_linear = layer_type == LINEAR_ATTENTION
        self.ple = None
        if ple_index is not None:
            self.ple = ParallelNgramEmbedding(config, ple_index, vllm_config, f"{prefix}.ple")
        if self.is_linear:
            self.linear_attn = ParallelGatedDeltaNet(config, vllm_config, f"{prefix}.linear_attn")
        else:
            self.self_attn = ParallelSparseAttention(
                config, rotary, vllm_config, f"{prefix}.self_attn"
            )
        self.attn_hyper_connection = HyperConnection(config)
        # vLLM's own block: it knows of expert parallelism, and has no part of the gated residual.
        self.mlp = Qwen3NextSparseMoeBlock(vllm_config=vllm_config, prefix=f"{prefix}.mlp")
        self.mlp_hyper_connection = HyperConnection(config)
        widen_norms(self)

    def forward(self, streams: Tensor, token_ids: Tensor | None, angles: Angles) -> Tensor:
        """[T, W] to [T, W]; the states are modified.

        Args:
            streams: [T, W].
            token_ids: [T], which only a layer with n-gram embeddings reads.
            angles: of the T rows.
        """
        if self.ple is not None:
            assert token_ids is not None, "a layer with n-gram embeddings is given the token ids"
            streams = streams + self.ple(streams, token_ids)
        hidden, normed = self.attn_hyper_connection.read(streams)
        mixed = self.linear_attn(hidden) if self.is_linear else self.self_attn(hidden, angles)
        streams = self.attn_hyper_connection.inject(streams, normed, mixed)
        hidden, normed = self.mlp_hyper_connection.read(streams)
        injected: Tensor = self.mlp_hyper_connection.inject(streams, normed, self.mlp(hidden))
        return injected
