"""Small models of odd shapes, each beside the same model in transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpForCausalLM as ReferenceForCausalLM,
)

from outrider.models.qwen4_exp import moe, sparse_attention
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

# It reports through `logging`, once per process, that it runs without fused kernels.
transformers.logging.set_verbosity_error()

# Of logits and streams of size one in float32, after four layers. Measured: 3e-6.
TOLERANCE = 2e-5
SEED = 4  # one at which no index selection is an exact tie, in any of the models
MIN_MARGIN = 1e-5  # a discrete choice nearer to its edge than this may fall either way in float32

_LINEAR, _INDEXED = "linear_attention", "indexed_attention"
_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "layer_types": (_LINEAR, _INDEXED, _LINEAR, _INDEXED),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "output_gate_type": "sigmoid",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
    "hc_count": 4,
    "hc_lowrank": 8,
    "ple_layer_ids": (1, 3),
    "ple_embed_dim": 24,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "eos_token_id": 3,
    "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 256,
}

# What each of them would show, were it read wrongly: see the names.
CONFIGS: dict[str, dict[str, Any]] = {
    "three_streams_4grams_prime_base": {
        "hc_count": 3,
        "ngram_size": 4,
        "ngram_vocab_size_base": 101,
    },
    "silu_gate_unnormalised_experts_full_rotation": {
        "output_gate_type": "silu",
        "norm_topk_prob": False,
        "partial_rotary_factor": 1.0,
        "num_experts_per_tok": 3,
        "hc_count": 2,
        "ngram_size": 2,
        "ple_conv_kernel_size": 3,
        "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 2,
        "indexer_n_heads": 5,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "tiny_activations_quarter_rotation": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "ple_layer_ids": (3,),
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "num_experts": 3,
        "num_experts_per_tok": 3,
        "indexer_n_heads": 6,
    },
    "sparse_first_one_key_head_odd_blocks": {
        "layer_types": (_INDEXED, _LINEAR, _LINEAR, _LINEAR),
        "ple_layer_ids": (2, 4),
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "hc_count": 5,
        "ngram_size": 5,
        "ple_conv_kernel_size": 2,
        "indexer_n_heads": 8,
        "indexer_head_dim": 12,
        "indexer_budget": 9,
        "indexer_compress_ratio": 3,
    },
    "tied_no_ngrams": {
        "tie_word_embeddings": True,
        "ple_layer_ids": (),
        "hc_lowrank": 3,
        "indexer_budget": 4,
        "shared_expert_intermediate_size": 3,
    },
}


def parity_config(name: str, **overrides: Any) -> Qwen4ExpConfig:
    return Qwen4ExpConfig(**{**_BASE, **CONFIGS[name], **overrides})


@torch.no_grad()
def parity_model(
    name: str, dtype: torch.dtype = torch.float32, seed: int = SEED, **overrides: Any
) -> Qwen4ExpForCausalLM:
    """A model in which nothing is trivial: no norm the identity, no convolution zero.

    Activations and logits are of size one, so that tolerances mean the same for all.
    """
    config = parity_config(name, **overrides)
    model = Qwen4ExpForCausalLM(config, config.mtp_num_hidden_layers)
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        is_matrix = parameter.dim() >= 2 and "embed" not in parameter_name
        std = parameter.shape[-1] ** -0.5 if is_matrix else 0.5
        parameter.normal_(0.0, std, generator=generator)
        if parameter_name.endswith("linear_attn.norm.weight"):
            parameter.add_(1.0)
    if name.startswith("tiny_activations"):
        _shrink(model)
    model.to(dtype).build_tables()
    return model.eval()


def _shrink(model: Qwen4ExpForCausalLM) -> None:
    """Brings what the epsilon of the l2 norm and the bound of the PLE gate act on near to them."""
    for name, parameter in model.named_parameters():
        if name.endswith("in_proj_qkv.weight"):
            parameter.mul_(1e-3)
        elif name.endswith("norm_key.weight"):
            parameter.mul_(1e-6).sub_(1.0)


def reference_model(model: Qwen4ExpForCausalLM) -> ReferenceForCausalLM:
    """The same weights in transformers, which has no MTP head."""
    values = model.config.to_hf_dict()
    del values["architectures"], values["model_type"]
    reference = ReferenceForCausalLM(Qwen4ExpTextConfig(**values))
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("mtp.")}
    reference.load_state_dict(weights)
    # The grouped form needs widths that are multiples of 16 bytes.
    reference.set_experts_implementation("eager")
    return reference.eval()


def random_ids(num_requests: int, length: int, eos_token_id: int, seed: int = SEED) -> Tensor:
    """Ids with ends of documents: at the start, one after the other, and here and there."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_BASE["vocab_size"], (num_requests, length), generator=generator)
    ids[0, [0, 7, 8, 30]] = eos_token_id
    ids[1:, 20] = eos_token_id
    return ids


@contextmanager
def recorded_margins(shape: tuple[int, int]) -> Iterator[list[Tensor]]:
    """Margins [B, T] of every discrete choice that `forward_sequence` makes meanwhile."""
    margins: list[Tensor] = []
    select_blocks, route = sparse_attention.select_blocks, moe.route

    def recording_select(*args: Any, **options: Any) -> Any:
        result = select_blocks(*args, **options)
        margins.append(result[1].expand(shape))
        return result

    def recording_route(*args: Any, **options: Any) -> Any:
        result = route(*args, **options)
        margins.append(result[2].view(shape))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_attention, "select_blocks", recording_select)
        patch.setattr(moe, "route", recording_route)
        yield margins


def is_clear(margins: list[Tensor]) -> Tensor:
    """[B, T] rows that no near-tie can have changed: neither their own nor one before them."""
    return torch.stack(margins).amin(0).cummin(-1).values > MIN_MARGIN
