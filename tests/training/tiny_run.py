"""A run so small that it takes seconds: a tiny model's folder, a short text, a configuration."""

import dataclasses
import json
from pathlib import Path

import torch

from outrider.bundled import BUNDLED_MODEL_DIR
from outrider.models.qwen4_exp.config import Qwen4ExpConfig
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from tests.text_checkpoint import copy_tokenizer

NUM_STEPS = 12
ROWS_PER_STEP = 2 * 24


def tiny_config(vocab_size: int) -> Qwen4ExpConfig:
    """The bundled shape with every size cut down; three layers, the last one sparse."""
    return dataclasses.replace(
        Qwen4ExpConfig.from_pretrained(BUNDLED_MODEL_DIR),
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=3,
        layer_types=("linear_attention", "linear_attention", "full_attention"),
        hc_lowrank=4,
        num_experts=4,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        ple_embed_dim=16,
        ngram_vocab_size_base=32,
        indexer_head_dim=8,
        indexer_budget=8,
        max_position_embeddings=64,
    )


def untrained(config: Qwen4ExpConfig, seed: int = 0) -> Qwen4ExpForCausalLM:
    """A trunk with a head, of fresh weights."""
    model = Qwen4ExpForCausalLM(config, num_mtp_layers=1)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def write_run(folder: Path, output: str = "out", **options: object) -> Path:
    """Writes a model's folder, two texts and a configuration; returns the configuration.

    Args:
        folder: where everything goes.
        output: name of the output folder below it, and of the configuration.
        options: keys of the configuration as "table.key", with values that JSON and TOML share.
    """
    model_dir = folder / "model"
    if not model_dir.exists():
        model_dir.mkdir(parents=True)
        copy_tokenizer(model_dir)
        (model_dir / "config.json").write_text(json.dumps(tiny_config(4096).to_hf_dict()))
        for name, word in (("train.txt", "row"), ("held_out.txt", "line")):
            lines = [f"{word} {number} of {number * 7 % 50}\n" for number in range(400)]
            (folder / name).write_text("".join(lines))
    values: dict[str, object] = {
        "run.model_dir": str(model_dir),
        "run.output_dir": str(folder / output),
        "run.device": "cpu",
        "run.log_every_steps": 1,
        "run.eval_every_steps": 5,
        "run.num_eval_windows": 2,
        "run.checkpoint_every_minutes": 0.0,
        "data.train": [str(folder / "train.txt")],
        "data.held_out": [str(folder / "held_out.txt")],
        "data.sequence_length": 24,
        "data.batch_size": 2,
        "schedule.max_tokens": NUM_STEPS * ROWS_PER_STEP,
        "schedule.warmup_steps": 2,
        **options,
    }
    lines = []
    for table in ("run", "data", "loss", "optimizer", "schedule"):
        lines.append(f"[{table}]")
        lines += [
            f"{key.partition('.')[2]} = {json.dumps(value)}"
            for key, value in values.items()
            if key.startswith(f"{table}.")
        ]
    path = folder / f"{output}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path
