"""A tiny model with every kind of block, its checkpoint on disk, and edits of that checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

Tensors = dict[str, Tensor]

# Two PLE layers with tables of different size; value heads share key heads; eleven parts, so that
# text order and numeric order of the n-gram shards differ, and the last of them is shorter.
TINY = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "output_gate_type": "sigmoid",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "shared_expert_intermediate_size": 7,
    "hc_count": 3,
    "hc_lowrank": 6,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24,
    "ngram_size": 3,
    "heads_per_ngram": 3,
    "ngram_vocab_size_base": 53,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 11,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}


def tiny_config(**overrides: Any) -> Qwen4ExpConfig:
    return Qwen4ExpConfig(**{**TINY, **overrides})


def random_model(config: Qwen4ExpConfig, dtype: torch.dtype = torch.float32) -> Qwen4ExpForCausalLM:
    """A model in which no two parameters and no two rows of one are alike."""
    model = Qwen4ExpForCausalLM(config, config.mtp_num_hidden_layers).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.build_tables()
    return model.eval()


def read_tensors(model_dir: Path) -> Tensors:
    return {
        name: tensor
        for path in sorted(model_dir.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def edit_tensors(model_dir: Path, edit: Callable[[Tensors], object]) -> None:
    """Let `edit` change the dict of tensors of a single-file checkpoint."""
    path = model_dir / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def rename(model_dir: Path, prefixes: dict[str, str]) -> None:
    """Give tensors another prefix; the first that fits counts."""

    def apply(tensors: Tensors) -> None:
        for name in list(tensors):
            for old, new in prefixes.items():
                if name.startswith(old):
                    tensors[new + name.removeprefix(old)] = tensors.pop(name)
                    break

    edit_tensors(model_dir, apply)


def assert_same_state(actual: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Parameters and buffers agree bit for bit, and by name."""
    states = actual.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, rtol=0, atol=0, msg=name)
