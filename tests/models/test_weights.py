"""Every tensor is loaded exactly once, whatever the layout, or the one that is not is named."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp import weights
from outrider.models.qwen4_exp.checkpoint_files import list_tensors
from outrider.models.qwen4_exp.checkpoint_names import make_load_plan
from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
from outrider.models.qwen4_exp.weights import has_mtp, load_model, save_checkpoint
from tests.models.tiny_checkpoint import (
    Tensors,
    assert_same_state,
    edit_json,
    edit_tensors,
    random_model,
    read_tensors,
    rename,
    tiny_config,
)

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"
TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding"
MTP_NORM = "mtp.pre_fc_norm_hidden.weight"

Checkpoint = tuple[Path, Qwen4ExpForCausalLM]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    config = tiny_config()
    model = random_model(config)
    save_checkpoint(model, config, tmp_path / "tiny", torch.float32)
    return tmp_path / "tiny", model


@pytest.mark.parametrize("max_shard_bytes", [None, 20_000])
@pytest.mark.parametrize("layout", ["packed", "per_expert"])
def test_reads_what_was_written(tmp_path: Path, layout: Any, max_shard_bytes: int | None) -> None:
    config = tiny_config(mtp_num_hidden_layers=2)
    model = random_model(config)
    save_checkpoint(model, config, tmp_path / "tiny", torch.float32, layout, max_shard_bytes)
    assert len(list((tmp_path / "tiny").glob("*.safetensors"))) == 1 or max_shard_bytes
    loaded = load_model(tmp_path / "tiny")
    assert loaded.mtp is not None
    assert len(loaded.mtp.layers) == 2
    assert_same_state(loaded, model)
    assert not any(tensor.is_meta for tensor in loaded.buffers())


@pytest.mark.parametrize(
    "prefixes",
    [
        {"model.": "model.language_model."},
        {"model.": "language_model."},
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        {"mtp.": "model.mtp."},
        {"lm_head.": "mtp.layers.0.shared_head.head."},
        {"model.": "model.language_model.", "lm_head.": "model.mtp.layers.0.shared_head.head."},
    ],
    ids=str,
)
def test_prefixes(checkpoint: Checkpoint, prefixes: dict[str, str]) -> None:
    model_dir, model = checkpoint
    rename(model_dir, prefixes)
    assert_same_state(load_model(model_dir), model)


def test_experts_are_packed_or_not_layer_by_layer(checkpoint: Checkpoint) -> None:
    model_dir, model = checkpoint

    def unpack(tensors: Tensors) -> None:
        for expert, (gate_up, down) in enumerate(
            zip(tensors.pop(GATE_UP), tensors.pop(DOWN), strict=True)
        ):
            stem = f"model.layers.0.mlp.experts.{expert}"
            gate, up = gate_up.chunk(2)
            tensors[f"{stem}.gate_proj.weight"] = gate.clone()
            tensors[f"{stem}.up_proj.weight"] = up.clone()
            tensors[f"{stem}.down_proj.weight"] = down.clone()

    edit_tensors(model_dir, unpack)
    assert_same_state(load_model(model_dir), model)


def test_ngram_parts_join_in_numeric_order_and_may_be_unequal(checkpoint: Checkpoint) -> None:
    model_dir, model = checkpoint
    parts = [name for name in read_tensors(model_dir) if name.startswith(f"{TABLE}.shard_")]
    assert len(parts) == 11, "ten or more, so that text order would be wrong"

    def divide_elsewhere(tensors: Tensors) -> None:
        table = torch.cat([tensors.pop(f"{TABLE}.shard_{i}.weight") for i in range(11)])
        for index, part in enumerate(table.split([1, 100, 0, len(table) - 101])):
            tensors[f"{TABLE}.shard_{index}.weight"] = part.clone()

    assert_same_state(load_model(model_dir), model)
    edit_tensors(model_dir, divide_elsewhere)
    assert_same_state(load_model(model_dir), model)


def test_undivided_ngram_table(checkpoint: Checkpoint) -> None:
    model_dir, model = checkpoint

    def join(tensors: Tensors) -> None:
        parts = [tensors.pop(f"{TABLE}.shard_{i}.weight") for i in range(11)]
        tensors[f"{TABLE}.weight"] = torch.cat(parts)

    edit_tensors(model_dir, join)
    assert_same_state(load_model(model_dir), model)


def test_vision_tensors_are_skipped_with_one_line(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir, model = checkpoint
    vision = {f"model.visual.blocks.{i}.norm.weight": torch.ones(3) for i in range(5)}
    vision["visual.patch_embed.weight"] = torch.full((2,), torch.nan)
    edit_tensors(model_dir, lambda tensors: tensors.update(vision))
    with caplog.at_level(logging.INFO):
        assert_same_state(load_model(model_dir), model)
    assert [r.message for r in caplog.records] == [f"{model_dir}: skipped 6 vision tensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_cast_to_the_dtype_of_the_engine(tmp_path: Path, dtype: torch.dtype) -> None:
    config = tiny_config()
    model = random_model(config)
    save_checkpoint(model, config, tmp_path / "tiny", torch.bfloat16)
    loaded = load_model(tmp_path / "tiny", dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert_same_state(loaded, model.to(torch.bfloat16).to(dtype))


def test_decay_parameters_stay_float32(tmp_path: Path) -> None:
    config = tiny_config()
    save_checkpoint(random_model(config), config, tmp_path / "tiny")
    loaded = load_model(tmp_path / "tiny", dtype=torch.bfloat16)
    kept = {n for n, p in loaded.named_parameters() if p.dtype == torch.float32}
    assert kept == {
        f"model.layers.{i}.linear_attn.{n}" for i in range(3) for n in ("A_log", "dt_bias")
    }


def test_tied_embedding(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    model, model_dir = random_model(config), tmp_path / "tiny"
    save_checkpoint(model, config, model_dir, torch.float32)
    assert "lm_head.weight" not in read_tensors(model_dir)
    loaded = load_model(model_dir)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_state(loaded, model)
    embedding = read_tensors(model_dir)["model.embed_tokens.weight"]
    edit_tensors(model_dir, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    assert_same_state(load_model(model_dir), model)
    edit_tensors(model_dir, lambda t: t.pop("model.embed_tokens.weight"))
    assert_same_state(load_model(model_dir), model)
    edit_tensors(
        model_dir,
        lambda t: t.update({"model.embed_tokens.weight": embedding + 1}),
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_model(model_dir)


def missing(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def extra(name: str, value: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


def changed(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def with_nan(value: torch.Tensor) -> torch.Tensor:
    value.view(-1)[-1] = torch.nan
    return value


ONE = torch.ones(1)
BROKEN: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing in the trunk": (
        missing("model.layers.3.self_attn.indexer.k_layernorm.weight"),
        "tensor model.layers.3.self_attn.indexer.k_layernorm.weight is missing",
    ),
    "missing lm_head": (missing("lm_head.weight"), "tensor lm_head.weight is missing"),
    "missing in the head": (missing(MTP_NORM), f"tensor {MTP_NORM} is missing"),
    "missing two": (missing(GATE_UP, DOWN), f"tensor {GATE_UP} is missing (and 1 more)"),
    "missing part of the table": (
        missing(f"{TABLE}.shard_4.weight"),
        f"tensor {TABLE}.shard_4.weight is missing",
    ),
    "missing last part of the table": (
        missing(f"{TABLE}.shard_10.weight"),
        f"tensor {TABLE}.shard_10.weight is missing",
    ),
    "missing hash buffer": (
        missing("model.layers.2.ple.ple_embedding.layer_multipliers"),
        "tensor model.layers.2.ple.ple_embedding.layer_multipliers is missing",
    ),
    "left over": (
        extra("model.layers.0.mlp.bias", ONE),
        "unexpected tensor model.layers.0.mlp.bias",
    ),
    "left over layer": (
        extra("model.layers.4.mlp.gate.weight", ONE),
        "unexpected tensor model.layers.4.mlp.gate.weight",
    ),
    "left over layer of the head": (
        extra("mtp.layers.1.mlp.gate.weight", ONE),
        "unexpected tensor mtp.layers.1.mlp.gate.weight",
    ),
    "no prefix": (extra("norm.weight", ONE), "unexpected tensor norm.weight"),
    "twice by prefix": (
        extra("model.language_model.layers.0.linear_attn.dt_bias", torch.ones(4)),
        "dt_bias is stored twice",
    ),
    "twice by packing": (
        extra("model.layers.0.mlp.experts.0.gate_proj.weight", torch.ones(5, 16)),
        "model.layers.0.mlp.experts.0.gate_proj.weight is stored twice",
    ),
    "twice by part": (
        extra(f"{TABLE}.weight", torch.ones(384, 4)),
        "shard_0.weight is stored twice",
    ),
    "part written twice": (
        extra(f"{TABLE}.shard_01.weight", torch.ones(34, 4)),
        f"unexpected tensor {TABLE}.shard_01.weight",
    ),
    "part too many": (
        extra(f"{TABLE}.shard_11.weight", torch.ones(34, 4)),
        f"{TABLE}.shard_11.weight has shape [34, 4]: shards 0 to 11 hold",
    ),
    "shape": (
        changed("model.layers.1.linear_attn.in_proj_a.weight", lambda t: t.T),
        "model.layers.1.linear_attn.in_proj_a.weight has shape [16, 4], expected [4, 16]",
    ),
    "shape of a hash buffer": (
        changed("model.layers.0.ple.ple_embedding.layer_multipliers", lambda t: t[:2]),
        "layer_multipliers has shape [2], expected [3]",
    ),
    "integer weights": (
        changed("lm_head.weight", lambda t: t.to(torch.int64)),
        "lm_head.weight has dtype I64, expected F64 or F32 or F16 or BF16",
    ),
    "NaN": (changed(MTP_NORM, with_nan), f"{MTP_NORM} holds a NaN"),
    "NaN in a part": (
        changed(f"{TABLE}.shard_10.weight", with_nan),
        f"{TABLE}.shard_10.weight holds a NaN",
    ),
    "hash": (
        changed("model.layers.2.ple.ple_embedding.ngram_heads_offsets", lambda t: t + 1),
        "model.layers.2.ple.ple_embedding.ngram_heads_offsets is [1,",
    ),
    "second lm_head": (
        extra("mtp.layers.0.shared_head.head.weight", torch.ones(61, 16)),
        "mtp.layers.0.shared_head.head.weight differs from lm_head.weight",
    ),
    "scale": (
        extra("model.layers.0.mlp.gate.weight_scale", ONE),
        "model.layers.0.mlp.gate.weight_scale (F32) belongs to a quantised checkpoint",
    ),
    "scale of the table": (
        extra(f"{TABLE}.weight_scale", ONE),
        f"{TABLE}.weight_scale (F32) belongs to a quantised checkpoint",
    ),
    "packed integers": (
        extra("mtp.layers.0.mlp.gate.weight_packed", ONE.to(torch.int32)),
        "weight_packed (I32) belongs to a quantised checkpoint",
    ),
    "float8": (
        changed("lm_head.weight", lambda t: t.to(torch.float8_e4m3fn)),
        "lm_head.weight (F8_E4M3) belongs to a quantised checkpoint",
    ),
}


@pytest.mark.parametrize(("edit", "phrase"), BROKEN.values(), ids=BROKEN.keys())
def test_names_the_tensor_that_is_wrong(
    checkpoint: Checkpoint, edit: Callable[[Tensors], object], phrase: str
) -> None:
    model_dir, _ = checkpoint
    edit_tensors(model_dir, edit)
    with pytest.raises(CheckpointError, match=re.escape(phrase)) as error:
        load_model(model_dir, want_mtp=True)
    assert str(model_dir / "model.safetensors") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layout", ["packed", "per_expert"])
def test_each_tensor_is_needed(tmp_path: Path, layout: Any) -> None:
    config = tiny_config()
    model = random_model(config)
    save_checkpoint(model, config, tmp_path, torch.float32, layout)
    stored = list_tensors(tmp_path)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    buffers = {n: tuple(b.shape) for n, b in model.named_buffers() if "ple_embedding" in n}
    plan = make_load_plan(stored, shapes, buffers, tmp_path)
    assert len(plan.pieces) + len(plan.hash_buffers) == len(stored)
    for tensor in stored:
        others = [other for other in stored if other is not tensor]
        with pytest.raises(CheckpointError, match=rf"{re.escape(tensor.name)} is missing$"):
            make_load_plan(others, shapes, buffers, tmp_path)


def test_missing_tensor_is_named_as_this_checkpoint_writes_it(checkpoint: Checkpoint) -> None:
    model_dir, _ = checkpoint
    rename(model_dir, {"model.": "model.language_model."})
    edit_tensors(model_dir, missing("model.language_model.layers.0.linear_attn.A_log"))
    with pytest.raises(CheckpointError, match=r"tensor model\.language_model\.layers\.0\.linear_a"):
        load_model(model_dir)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    config, model_dir = tiny_config(), tmp_path / "tiny"
    save_checkpoint(random_model(config), config, model_dir, torch.float32, "per_expert")
    edit_tensors(model_dir, missing("model.layers.2.mlp.experts.1.up_proj.weight"))
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.mlp\.experts\.1\.up_proj\.weight is miss"
    ):
        load_model(model_dir)


def drop_head(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])


def test_without_a_head_only_plain_decoding_loads(checkpoint: Checkpoint) -> None:
    model_dir, _ = checkpoint
    assert has_mtp(model_dir)
    drop_head(model_dir)
    assert not has_mtp(model_dir)
    assert load_model(model_dir).mtp is None
    assert load_model(model_dir, want_mtp=False).mtp is None
    with pytest.raises(CheckpointError, match=r"has no mtp\.\* tensors"):
        load_model(model_dir, want_mtp=True)


def test_a_head_that_is_not_wanted_is_skipped(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir, model = checkpoint
    with caplog.at_level(logging.INFO):
        loaded = load_model(model_dir, want_mtp=False)
    assert "skipped 31 tensors of the unused MTP head" in caplog.text
    model.mtp = None
    assert_same_state(loaded, model)


def test_a_head_that_the_configuration_does_not_know_is_no_silent_k0(
    checkpoint: Checkpoint,
) -> None:
    model_dir, _ = checkpoint
    edit_json(model_dir / "config.json", lambda config: config.pop("mtp_num_hidden_layers"))
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers is missing or 0"):
        load_model(model_dir)


def test_a_parameter_that_is_forgotten_is_noticed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The NaN check has power: with one piece lost between plan and copy, it fails."""
    model_dir, _ = checkpoint

    def lossy(*args: Any) -> Any:
        plan = make_load_plan(*args)
        plan.pieces.pop()
        return plan

    monkeypatch.setattr(weights, "make_load_plan", lossy)
    with pytest.raises(AssertionError, match="were not loaded"):
        load_model(model_dir)
