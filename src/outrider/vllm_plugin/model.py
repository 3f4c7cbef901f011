"""Qwen4-Exp on vLLM where vLLM has no model of its own: the trunk and its vocabulary head."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMRoPE, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from outrider.layers.rotary import RotaryEmbedding
from outrider.models.qwen4_exp.hyper_connection import HyperConnection
from outrider.vllm_plugin.architecture import check_cache_dtypes, check_weights, read_architecture
from outrider.vllm_plugin.decoder_layer import ParallelDecoderLayer
from outrider.vllm_plugin.norm import widen_norms
from outrider.vllm_plugin.recurrent_state import COPY_FUNCTIONS, STATE_TYPE, state_spec
from outrider.vllm_plugin.vocabulary import VocabularyModel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.model_executor.layers.mamba.mamba_utils import (
        MambaStateCopyFunc,
        MambaStateCopyFuncsByType,
    )
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    from outrider.models.qwen4_exp.config import Qwen4ExpConfig

EXPERT_MAPPER = WeightsMapper(
    orig_to_new_stacked={
        ".shared_expert.gate_proj": (".shared_expert.gate_up_proj", 0),
        ".shared_expert.up_proj": (".shared_expert.gate_up_proj", 1),
    }
)
"""The one pair of matrices that vLLM's block of experts keeps as one."""


def build_rotary(config: Qwen4ExpConfig, vllm_config: VllmConfig) -> RotaryEmbedding:
    """The rotary table for as many positions as the server takes."""
    rotary = RotaryEmbedding(
        config.rotary_dim, config.rope_theta, vllm_config.model_config.max_model_len
    )
    rotary.build(torch.device("cpu"), vllm_config.model_config.dtype)
    return rotary


class Qwen4ExpModel(nn.Module):
    """The trunk, or the part of it that a pipeline stage has."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        check_cache_dtypes(vllm_config)
        config = self.config = read_architecture(vllm_config)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self._rotary = [build_rotary(config, vllm_config)]

        def make_layer(prefix: str) -> ParallelDecoderLayer:
            index = extract_layer_index(prefix)
            is_ple = index in config.ple_layer_indices
            return ParallelDecoderLayer(
                config,
                config.layer_types[index],
                self._rotary[0],
                vllm_config,
                prefix,
                config.ple_layer_indices.index(index) if is_ple else None,
            )

        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers, make_layer, prefix=f"{prefix}.layers"
        )
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["streams"], config.stream_width
        )
        self.streams: Tensor | None = None
        if get_pp_group().is_last_rank:
            self.hyper_connection_mixer = HyperConnection(config, has_inject=False)
            widen_norms(self.hyper_connection_mixer)
        else:
            self.hyper_connection_mixer = PPMissingLayer()

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """What the vocabulary head reads, [T, C]; the streams before the mixer are kept.

        Args:
            input_ids: [T].
            positions: [T], or [3, T] where the server counts them on three axes; text has one.
            intermediate_tensors: what the pipeline stage before this one has made.
            inputs_embeds: [T, C] in place of the embedded ids.
        """
        if positions.dim() == 2:
            positions = positions[0]
        if get_pp_group().is_first_rank:
            if inputs_embeds is None:
                assert input_ids is not None, "a first stage is given ids or embeddings"
                inputs_embeds = self.embed_tokens(input_ids)
            streams = inputs_embeds.repeat(1, self.config.hc_count)
        else:
            assert intermediate_tensors is not None, "a later stage is given the streams"
            streams = intermediate_tensors["streams"]
        angles = self._rotary[0].angles(positions)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            streams = layer(streams, input_ids, angles)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"streams": streams})
        self.streams = streams
        hidden, _ = self.hyper_connection_mixer.read(streams)
        return hidden


class Qwen4ExpForCausalLM(VocabularyModel, HasInnerState, IsHybrid, SupportsMRoPE, SupportsPP):
    """The text model that vLLM serves."""

    hf_to_vllm_mapper: ClassVar[WeightsMapper] = EXPERT_MAPPER | WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "model.",
            "language_model.model.": "model.",
            # Images are not for this model, and the head is loaded by its own.
            "model.visual.": None,
            "visual.": None,
            "mtp.": None,
            "model.mtp.": None,
        }
    )
    # The n-gram hash reads the ids.
    requires_raw_input_tokens = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.model = Qwen4ExpModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self._vllm_config = vllm_config
        config = self.config = vllm_config.model_config.hf_text_config
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            if config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        else:
            self.lm_head = PPMissingLayer()
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """What the vocabulary head reads, [T, C]; see `Qwen4ExpModel.forward`."""
        hidden: Tensor | IntermediateTensors = self.model(
            input_ids, positions, intermediate_tensors, inputs_embeds
        )
        return hidden

    def get_mtp_target_hidden_states(self) -> Tensor | None:
        """The streams [T, W] of the last pass: what the head drafts from."""
        return self.model.streams

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Positions on three axes, [3, T], which are the same for text, and their offset."""
        del mm_features
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the trunk; returns the names of what was loaded.

        Raises:
            CheckpointError: a tensor is missing or of another shape.
        """
        check_weights(self._vllm_config, num_mtp_layers=0)
        loaded: set[str] = AutoWeightsLoader(self).load_weights(
            weights, mapper=self.hf_to_vllm_mapper
        )
        return loaded

    @classmethod
    def get_mamba_specs_from_config(cls, vllm_config: VllmConfig) -> tuple[MambaSpec, ...]:
        """The one slot that all layers with a state share."""
        return (state_spec(vllm_config),)

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, ...], ...]:
        """The slot as bytes."""
        return state_spec(vllm_config).shapes

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Of the slot as bytes."""
        return state_spec(vllm_config).dtypes

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """How a slot is copied."""
        return COPY_FUNCTIONS

    @classmethod
    def get_mamba_state_copy_funcs(
        cls, mamba_types: set[MambaAttentionBackendEnum]
    ) -> MambaStateCopyFuncsByType:
        """How a slot is copied, by the name that vLLM keeps it under."""
        assert mamba_types == {STATE_TYPE}, f"states of {mamba_types}"
        return {STATE_TYPE: COPY_FUNCTIONS}


class Qwen4ExpForConditionalGeneration(Qwen4ExpForCausalLM):
    """The text model of a checkpoint that also has one for images, which is left out."""
