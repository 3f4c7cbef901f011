"""The trunk, the vocabulary head, and the MTP head beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.layers.rotary import RotaryEmbedding
from outrider.models.qwen4_exp.decoder_layer import DecoderLayer, SequenceOptions, SequenceOutput
from outrider.models.qwen4_exp.hyper_connection import HyperConnection
from outrider.models.qwen4_exp.mtp import MultiTokenPredictor

if TYPE_CHECKING:
    from outrider.batch import ForwardBatch, MarginProbe
    from outrider.cache.layer_states import LayerStates
    from outrider.models.qwen4_exp.config import Qwen4ExpConfig


class Qwen4ExpModel(nn.Module):
    """The trunk: embedding, layers, final mixer."""

    def __init__(self, config: Qwen4ExpConfig, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.num_streams = config.hc_count
        self._rotary = [rotary]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        ranks = {index: rank for rank, index in enumerate(config.ple_layer_indices)}
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_type, rotary, ranks.get(index))
            for index, layer_type in enumerate(config.layer_types)
        )
        self.hyper_connection_mixer = HyperConnection(config, has_inject=False)

    def forward(
        self, batch: ForwardBatch, states: list[LayerStates], probe: MarginProbe | None = None
    ) -> Tensor:
        """Runs the rows of a batch.

        Args:
            batch: rows and windows.
            states: of each layer; modified.
            probe: collects the margins of discrete choices.

        Returns:
            Streams after the last layer, before the final mixer, [T, W].
        """
        angles = self._rotary[0].angles(batch.positions)
        streams = self.embed_tokens(batch.token_ids).repeat(1, self.num_streams)
        for layer, layer_states in zip(self.layers, states, strict=True):
            streams = layer(streams, batch, layer_states, angles, probe=probe)
        return streams

    def forward_sequence(
        self, token_ids: Tensor, options: SequenceOptions | None = None
    ) -> SequenceOutput:
        """Whole sequences [B, T] from empty states, differentiable."""
        options = options or SequenceOptions()
        angles = self._rotary[0].angles(torch.arange(token_ids.shape[1], device=token_ids.device))
        output = SequenceOutput(self.embed_tokens(token_ids).repeat(1, 1, self.num_streams))
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            output.streams = layer.forward_sequence(
                output.streams, token_ids, angles, options, output
            )
        return output


class Qwen4ExpForCausalLM(nn.Module):
    """Trunk and vocabulary head, with the MTP head where the checkpoint has one.

    Args:
        config: the model's configuration.
        num_mtp_layers: layers of the head; 0 builds none.
        max_positions: rows of the rotary table; the configuration's limit if None.
    """

    def __init__(
        self, config: Qwen4ExpConfig, num_mtp_layers: int = 0, max_positions: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.rotary = RotaryEmbedding(
            config.rotary_dim, config.rope_theta, max_positions or config.max_position_embeddings
        )
        self.model = Qwen4ExpModel(config, self.rotary)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = (
            MultiTokenPredictor(config, self.rotary, num_mtp_layers) if num_mtp_layers else None
        )
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def build_tables(self) -> None:
        """Fills what is computed rather than loaded; called once device and dtype are known."""
        weight = self.lm_head.weight
        self.rotary.build(weight.device, weight.dtype)

    def logits(self, streams: Tensor) -> Tensor:
        """The trunk's streams [..., W] to logits [..., V]."""
        return self.lm_head(self.model.hyper_connection_mixer.read(streams)[0])

    def output_rows(self, streams: Tensor) -> Tensor:
        """The trunk's streams [B, T, W] to what `lm_head` reads, [B, T, C], for training."""
        mixer: HyperConnection = self.model.hyper_connection_mixer
        return mixer.read_sequence(streams)[0]

    def mtp_output_rows(self, streams: Tensor) -> Tensor:
        """The head's streams [B, T, W] to what `lm_head` reads, [B, T, C], for training."""
        assert self.mtp is not None, "the model was built without its head"
        mixer: HyperConnection = self.mtp.hyper_connection_mixer
        return mixer.read_sequence(streams)[0]

    def mtp_logits(self, streams: Tensor) -> Tensor:
        """The head's streams [..., W] to logits [..., V]."""
        assert self.mtp is not None, "the model was built without its head"
        return self.lm_head(self.mtp.hyper_connection_mixer.read(streams)[0])

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Fills the parameters for training from nothing.

        Matrices are normal with `initializer_range`, those that write to the streams smaller by
        the root of the number of writes; norms start as the identity, decays spread over a range.
        """
        writes = 2 * (len(self.model.layers) + (len(self.mtp.layers) if self.mtp else 0))
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                std = self.config.initializer_range
                if name.endswith(
                    ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
                ):
                    std /= writes**0.5
                if name.endswith("conv1d.weight"):
                    std = parameter.shape[-1] ** -0.5 if "linear_attn" in name else 0.0
                parameter.normal_(0.0, std, generator=generator) if std else parameter.zero_()
            elif name.endswith("A_log"):
                parameter.uniform_(1.0, 16.0, generator=generator).log_()
            elif name.endswith("dt_bias"):
                # Inverse softplus of a step between 1e-3 and 1e-1, spread evenly in its logarithm.
                step = torch.empty_like(parameter).uniform_(-6.9, -2.3, generator=generator).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))
            elif name.endswith("linear_attn.norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.zero_()
        self.build_tables()
