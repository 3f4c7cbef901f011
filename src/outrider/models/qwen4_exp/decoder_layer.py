"""One layer: n-gram embedding, then a sequence mixer and the experts, in gated residuals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from outrider.models.qwen4_exp.config import LINEAR_ATTENTION, Qwen4ExpConfig
from outrider.models.qwen4_exp.gated_delta_net import GatedDeltaNet
from outrider.models.qwen4_exp.hyper_connection import HyperConnection
from outrider.models.qwen4_exp.moe import SparseMoeBlock
from outrider.models.qwen4_exp.ngram_embedding import NgramEmbedding
from outrider.models.qwen4_exp.sparse_attention import Angles, IndexShare, SparseAttention

if TYPE_CHECKING:
    from outrider.batch import ForwardBatch, MarginProbe
    from outrider.cache.layer_states import LayerStates
    from outrider.layers.rotary import RotaryEmbedding
    from outrider.models.qwen4_exp.sparse_attention import DepthRows


@dataclass
class SequenceOptions:
    """How the differentiable forward runs.

    Attributes:
        dense_attention: attend to everything visible, whatever the indexers say.
        want_index_losses: collect the distillation losses of the indexers.
        row_mask: [B, T] bool, the rows that count in these losses; None is all of them.
    """

    dense_attention: bool = False
    want_index_losses: bool = False
    row_mask: Tensor | None = None


@dataclass
class SequenceOutput:
    """What the differentiable forward returns.

    Attributes:
        streams: [B, T, W].
        router_logits: one [B * T, E] per layer.
        index_losses: one scalar per sparse layer, where asked for.
    """

    streams: Tensor
    router_logits: list[Tensor] = field(default_factory=list)
    index_losses: list[Tensor] = field(default_factory=list)


class DecoderLayer(nn.Module):
    """A layer of the trunk or of the head.

    Args:
        config: the model's configuration.
        layer_type: "linear_attention" or "indexed_attention".
        rotary: the model's rotary table.
        ple_index: rank among the layers with n-gram embeddings, or None.
    """

    def __init__(
        self,
        config: Qwen4ExpConfig,
        layer_type: str,
        rotary: RotaryEmbedding,
        ple_index: int | None = None,
    ) -> None:
        super().__init__()
        self.is_linear = layer_type == LINEAR_ATTENTION
        self.ple = None if ple_index is None else NgramEmbedding(config, ple_index)
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = SparseAttention(config, rotary)
        self.attn_hyper_connection = HyperConnection(config)
        self.mlp = SparseMoeBlock(config)
        self.mlp_hyper_connection = HyperConnection(config)

    def forward(
        self,
        streams: Tensor,
        batch: ForwardBatch,
        states: LayerStates,
        angles: Angles,
        *,
        share: IndexShare | None = None,
        probe: MarginProbe | None = None,
    ) -> Tensor:
        """[T, W] to [T, W]; the states are modified."""
        if self.ple is not None:
            assert states.ngram is not None, "a layer with n-grams has their state"
            streams = streams + self.ple(streams, batch, states.ngram)
        hidden, normed = self.attn_hyper_connection.read(streams)
        if self.is_linear:
            assert states.delta_net is not None, "a delta-net layer has its state"
            mixed = self.linear_attn(hidden, batch, states.delta_net)
        else:
            assert states.attention is not None, "a sparse-attention layer has its state"
            mixed = self.self_attn(
                hidden, batch, states.attention, angles, share=share, probe=probe
            )
        streams = self.attn_hyper_connection.inject(streams, normed, mixed)
        hidden, normed = self.mlp_hyper_connection.read(streams)
        return self.mlp_hyper_connection.inject(streams, normed, self.mlp(hidden, probe))

    def forward_sequence(
        self,
        streams: Tensor,
        token_ids: Tensor | None,
        angles: Angles,
        options: SequenceOptions,
        collected: SequenceOutput,
        *,
        past: list[DepthRows] | None = None,
        depth: int = 0,
    ) -> Tensor:
        """Whole sequences [B, T, W] from empty states, differentiable.

        Args:
            streams: [B, T, W].
            token_ids: [B, T], for the n-grams; None where the layer has none.
            angles: of positions 0..T-1.
            options: how to run.
            collected: gathers router logits and indexer losses.
            past: rows of shallower draft depths (`SparseAttention.forward_sequence`).
            depth: draft depth of this call.
        """
        if self.ple is not None:
            assert token_ids is not None, "n-grams are made of token ids"
            streams = streams + self.ple.forward_sequence(streams, token_ids)
        hidden, strength, same = self.attn_hyper_connection.read_sequence(streams)
        if self.is_linear:
            mixed = self.linear_attn.forward_sequence(hidden)
        else:
            mixed, loss = self.self_attn.forward_sequence(
                hidden,
                angles,
                past=past,
                depth=depth,
                dense=options.dense_attention,
                want_index_loss=options.want_index_losses,
                row_mask=options.row_mask,
            )
            if loss is not None:
                collected.index_losses.append(loss)
        streams = self.attn_hyper_connection.inject_sequence(same, strength, mixed)
        hidden, strength, same = self.mlp_hyper_connection.read_sequence(streams)
        mixed, logits = self.mlp.forward_sequence(hidden)
        collected.router_logits.append(logits)
        return self.mlp_hyper_connection.inject_sequence(same, strength, mixed)
