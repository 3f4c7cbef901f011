"""The multi-token-prediction head: one more layer that looks a token further ahead.

Row p takes the trunk's streams X_p and the token x_{p+1}, sits at position p in its own cache,
and predicts x_{p+2}. To draft further, its own streams Y_p stand in for X_{p+1}:

    position      p                 p+1
    streams       X_p (trunk)       Y_p (fed back, before the head's mixer)
    token         x_{p+1}           d_1, the draft of x_{p+2}
    predicts      x_{p+2} -> d_1    x_{p+3} -> d_2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.layers.norm import RMSNorm
from outrider.models.qwen4_exp.config import INDEXED_ATTENTION, Qwen4ExpConfig
from outrider.models.qwen4_exp.decoder_layer import DecoderLayer, SequenceOptions, SequenceOutput
from outrider.models.qwen4_exp.hyper_connection import HyperConnection

if TYPE_CHECKING:
    from outrider.batch import ForwardBatch
    from outrider.cache.layer_states import LayerStates
    from outrider.layers.rotary import RotaryEmbedding
    from outrider.models.qwen4_exp.sparse_attention import DepthRows, IndexShare


class MultiTokenPredictor(nn.Module):
    """Drafts from the trunk's streams and the next token; embedding and lm_head are the trunk's."""

    def __init__(self, config: Qwen4ExpConfig, rotary: RotaryEmbedding, num_layers: int) -> None:
        super().__init__()
        hidden, width, eps = config.hidden_size, config.stream_width, config.rms_norm_eps
        self.num_streams = config.hc_count
        self._rotary = [rotary]
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps)
        # One mean over all streams at once, unlike the norms of the gated residual.
        self.pre_fc_norm_hidden = RMSNorm(width, eps)
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.layers = nn.ModuleList(
            DecoderLayer(config, INDEXED_ATTENTION, rotary) for _ in range(num_layers)
        )
        self.hyper_connection_mixer = HyperConnection(config, has_inject=False)

    def layer(self, spec_step_idx: int) -> DecoderLayer:
        """The layer that drafts at a step: `spec_step_idx % num_mtp_layers`."""
        layer = self.layers[spec_step_idx % len(self.layers)]
        assert isinstance(layer, DecoderLayer)
        return layer

    def fuse(self, streams: Tensor, embedded: Tensor) -> Tensor:
        """Adds the projected embedding to every projected stream.

        Args:
            streams: [..., W], the trunk's or the head's own, before any mixer.
            embedded: [..., C], embedding of the token that follows the streams' position.

        Returns:
            [..., W].
        """
        normed = self.pre_fc_norm_hidden(streams).unflatten(-1, (self.num_streams, -1))
        token = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        return (self.fc_hidden(normed) + token[..., None, :]).flatten(-2)

    def _fuse_sequence(self, streams: Tensor, embedded: Tensor) -> Tensor:
        """`fuse` for training."""
        normed = self.pre_fc_norm_hidden.forward_sequence(streams)
        token = self.fc_embedding(self.pre_fc_norm_embedding.forward_sequence(embedded))
        projected = self.fc_hidden(normed.unflatten(-1, (self.num_streams, -1)))
        return (projected + token[..., None, :]).flatten(-2)

    def forward(
        self,
        streams: Tensor,
        embedded: Tensor,
        batch: ForwardBatch,
        states: list[LayerStates],
        spec_step_idx: int,
        share: IndexShare | None = None,
    ) -> Tensor:
        """One draft step.

        Args:
            streams: [T, W].
            embedded: [T, C].
            batch: rows and windows in the head's own cache groups.
            states: of each layer of the head; modified.
            spec_step_idx: 0-based.
            share: one index selection for all steps of the iteration.

        Returns:
            Streams [T, W]: what the next step is fed, and what `Qwen4ExpForCausalLM.mtp_logits`
            turns into logits.
        """
        index = spec_step_idx % len(self.layers)
        angles = self._rotary[0].angles(batch.positions)
        fused = self.fuse(streams, embedded)
        return self.layer(index)(fused, batch, states[index], angles, share=share)

    def unroll(
        self,
        streams: Tensor,
        embedded: Tensor,
        num_depths: int,
        options: SequenceOptions | None = None,
    ) -> list[SequenceOutput]:
        """All draft depths over whole sequences, as they run at inference, differentiable.

        Row p of every depth takes the token x_{p+1} and predicts x_{p+2}. Depth 0 reads X_p;
        depth j reads row p - 1 of depth j - 1. Rows p < j have no such predecessor: their
        streams are meaningless and belong in no loss.

        Exact for depth 0, and for all depths where attention is dense. Past the budget of the
        indexer a deeper depth is near it: it scores blocks by index keys of its own rows, where
        a cache holds those of depth 0, and always attends to the rows of its own round.

        Args:
            streams: [B, T, W], of the trunk.
            embedded: [B, T, C], row p the embedding of x_{p+1}.
            num_depths: K.
            options: how to run.

        Returns:
            One output a depth.
        """
        options = options or SequenceOptions()
        places = torch.arange(streams.shape[1], device=streams.device)
        angles = self._rotary[0].angles(places)
        pasts: list[list[DepthRows]] = [[] for _ in self.layers]
        outputs: list[SequenceOutput] = []
        for depth in range(num_depths):
            output = SequenceOutput(streams)
            fused = self._fuse_sequence(streams, embedded)
            depth_options = options if depth == 0 else SequenceOptions(options.dense_attention)
            output.streams = self.layer(depth).forward_sequence(
                fused,
                None,
                angles,
                depth_options,
                output,
                past=pasts[depth % len(self.layers)],
                depth=depth,
            )
            outputs.append(output)
            streams = torch.roll(output.streams, 1, dims=1)
        return outputs
