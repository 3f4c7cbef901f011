"""The multi-token-prediction head on vLLM: a draft model that reads the trunk's streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.config import INDEXED_ATTENTION
from outrider.models.qwen4_exp.mtp import MultiTokenPredictor
from outrider.vllm_plugin.architecture import check_weights, read_architecture
from outrider.vllm_plugin.decoder_layer import ParallelDecoderLayer
from outrider.vllm_plugin.model import EXPERT_MAPPER, build_rotary
from outrider.vllm_plugin.norm import widen_norms
from outrider.vllm_plugin.vocabulary import VocabularyModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm.config import VllmConfig

    from outrider.models.qwen4_exp.config import Qwen4ExpConfig

_TRUNK_PREFIXES = ("model.language_model.", "language_model.model.", "model.")


class ParallelMultiTokenPredictor(MultiTokenPredictor):
    """The layers of the head; embedding and vocabulary head are shared with the trunk."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = read_architecture(vllm_config)
        rotary = build_rotary(config, vllm_config)
        super().__init__(config, rotary, num_layers=0)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        for name in ("fc_embedding", "fc_hidden"):
            layer = ColumnParallelLinear(
                config.hidden_size,
                config.hidden_size,
                bias=False,
                gather_output=True,
                prefix=f"{prefix}.{name}",
                return_bias=False,
            )
            setattr(self, name, layer)
        # Numbered after the trunk's layers: vLLM orders caches by the number in a layer's name.
        self.layers = nn.ModuleList(
            ParallelDecoderLayer(
                config,
                INDEXED_ATTENTION,
                rotary,
                vllm_config,
                f"{prefix}.layers.{config.num_hidden_layers + index}",
            )
            for index in range(config.mtp_num_hidden_layers)
        )
        widen_norms(self)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        hidden_states: Tensor,
        inputs_embeds: Tensor | None,
        spec_step_idx: int,
    ) -> tuple[Tensor, Tensor]:
        """One draft step; see `Qwen4ExpMTP.forward`."""
        if positions.dim() == 2:
            positions = positions[0]
        if inputs_embeds is None:
            assert input_ids is not None, "a draft step is given ids or embeddings"
            inputs_embeds = self.embed_tokens(input_ids)
        angles = self._rotary[0].angles(positions)
        layer = self.layers[spec_step_idx % len(self.layers)]
        streams = layer(self.fuse(hidden_states, inputs_embeds), None, angles)
        hidden, _ = self.hyper_connection_mixer.read(streams)
        return hidden, streams


class Qwen4ExpMTP(VocabularyModel):
    """The draft model that vLLM drives."""

    hf_to_vllm_mapper: ClassVar[WeightsMapper] = EXPERT_MAPPER

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        _refuse_shared_indices(vllm_config)
        _refuse_more_layers(read_architecture(vllm_config))
        self.model = ParallelMultiTokenPredictor(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "mtp")
        )
        config = self.config = vllm_config.model_config.hf_text_config
        self._vllm_config = vllm_config
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
            )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        hidden_states: Tensor,
        inputs_embeds: Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Row p takes the streams of position p and the token of position p + 1, as
        `MultiTokenPredictor` says.

        Args:
            input_ids: [T], the token after each row's position.
            positions: [T], or [3, T].
            hidden_states: [T, W], of the trunk or of the step before.
            inputs_embeds: [T, C] in place of the embedded ids.
            spec_step_idx: 0-based; it chooses the layer, of which there is one: vLLM's V1 runner
                names no step.

        Returns:
            [T, C], which the vocabulary head reads, and the streams [T, W], which the next step is
            given.
        """
        drafted: tuple[Tensor, Tensor] = self.model(
            input_ids, positions, hidden_states, inputs_embeds, spec_step_idx
        )
        return drafted

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the head, and the embedding and vocabulary head that it shares.

        Raises:
            CheckpointError: the checkpoint has no head, or a tensor is missing or of another
                shape.
        """
        names = _HeadTensors(weights)
        loaded: set[str] = AutoWeightsLoader(self).load_weights(
            names, mapper=self.hf_to_vllm_mapper
        )
        if not names.num_found:
            raise CheckpointError(
                f"{self._vllm_config.model_config.model}: no tensor mtp.*: the checkpoint has no "
                "head to draft with; leave --speculative-config out"
            )
        check_weights(self._vllm_config, len(self.model.layers))
        if self.config.tie_word_embeddings:
            loaded.add("lm_head.weight")
        return loaded


def _refuse_shared_indices(vllm_config: VllmConfig) -> None:
    """Raises CheckpointError where all draft steps are to follow the first one's selection."""
    speculative = vllm_config.speculative_config
    assert speculative is not None, "a head is built to draft"
    if getattr(speculative.draft_model_config.hf_config, "index_share_for_mtp_iteration", False):
        raise CheckpointError(
            "index_share_for_mtp_iteration: on the CPU the head selects anew in each draft step; "
            'put "index_share_for_mtp_iteration": false into --speculative-config'
        )


def _refuse_more_layers(config: Qwen4ExpConfig) -> None:
    """Raises CheckpointError where draft steps take turns in the layers of the head.

    The V1 runner runs the kept rows of a text at its first draft step alone, so that the caches of
    other layers than the first would have holes.
    """
    if config.mtp_num_hidden_layers > 1:
        raise CheckpointError(
            f"mtp_num_hidden_layers must be 1 to draft with, got {config.mtp_num_hidden_layers}"
        )


class _HeadTensors:
    """The tensors of a checkpoint that the draft model has, under its own names.

    Attributes:
        num_found: tensors of the head itself, so far.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = weights
        self.num_found = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for published, weight in self._weights:
            name = published.removeprefix("model.") if "mtp." in published else published
            if name.startswith("mtp."):
                self.num_found += 1
                yield f"model.{name.removeprefix('mtp.')}", weight
            elif name == "lm_head.weight":
                yield name, weight
            elif any(name == f"{prefix}embed_tokens.weight" for prefix in _TRUNK_PREFIXES):
                yield "model.embed_tokens.weight", weight
