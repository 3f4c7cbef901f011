"""What is written loads here and in transformers, and a failed write leaves what was there."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp import checkpoint_writer
from outrider.models.qwen4_exp.checkpoint_files import list_tensors
from outrider.models.qwen4_exp.weights import load_model, save_checkpoint
from tests.models.tiny_checkpoint import (
    assert_same_state,
    edit_json,
    random_model,
    read_tensors,
    tiny_config,
)


def test_names_and_shapes_of_the_packed_layout(tmp_path: Path) -> None:
    config = tiny_config()
    save_checkpoint(random_model(config), config, tmp_path / "out")
    shapes = {tensor.name: tensor.shape for tensor in list_tensors(tmp_path / "out")}
    dtypes = {tensor.name: tensor.dtype for tensor in list_tensors(tmp_path / "out")}
    assert shapes["model.layers.3.mlp.experts.gate_up_proj"] == (3, 10, 16)
    assert shapes["mtp.layers.0.mlp.experts.down_proj"] == (3, 16, 5)
    parts = [
        shapes[f"model.layers.2.ple.ple_embedding.ngram_embedding.shard_{i}.weight"]
        for i in range(11)
    ]
    assert sum(rows for rows, _ in parts) == config.ngram_table_rows(1)
    assert len(set(parts)) == 2, "the last part is shorter"
    assert sum(name.startswith("mtp.") for name in shapes) == 31
    integers = {name for name, dtype in dtypes.items() if dtype == "I64"}
    assert {name.rpartition(".")[2] for name in integers} == {
        "layer_multipliers",
        "ngram_heads_vocab_sizes",
        "ngram_heads_offsets",
    }
    assert {dtypes[name] for name in shapes.keys() - integers} == {"BF16"}


def test_shards_keep_to_the_limit_and_the_index_lists_them(tmp_path: Path) -> None:
    config = tiny_config()
    save_checkpoint(random_model(config), config, tmp_path / "out", max_shard_bytes=10_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    tensors = list_tensors(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(tensor.num_bytes for tensor in tensors)
    for shard in shards:
        sizes = [tensor.num_bytes for tensor in tensors if tensor.path.name == shard]
        assert sum(sizes) <= 10_000 or len(sizes) == 1
        with safe_open(tmp_path / "out" / shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_replaces_older_weights_and_leaves_other_files(tmp_path: Path) -> None:
    config = tiny_config()
    (tmp_path / "tokenizer.json").write_text("{}")
    old, new = random_model(config), random_model(config)
    save_checkpoint(old, config, tmp_path, torch.float32)
    save_checkpoint(new, config, tmp_path, torch.float32, max_shard_bytes=10_000)
    assert_same_state(load_model(tmp_path), new)
    save_checkpoint(old, config, tmp_path, torch.float32)
    assert_same_state(load_model(tmp_path), old)
    names = {"tokenizer.json", "config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("exists", [True, False])
def test_a_failed_write_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    config, out_dir = tiny_config(), tmp_path / "out"
    old = random_model(config)
    if exists:
        save_checkpoint(old, config, out_dir, torch.float32)
    written = []

    def fail_at_the_second(tensors: Any, path: Path, metadata: Any) -> None:
        written.append(path)
        path.touch()
        if len(written) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "save_file", fail_at_the_second)
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        save_checkpoint(random_model(config), config, out_dir, max_shard_bytes=10_000)
    assert len(written) == 2
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if exists else [])
    if exists:
        assert_same_state(load_model(out_dir), old)


def test_a_new_directory_has_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    config = tiny_config()
    save_checkpoint(random_model(config), config, tmp_path / "out")
    modes = {oct(os.stat(tmp_path / name).st_mode) for name in ("plain", "out")}
    assert len(modes) == 1
    names = ("plain/file", "out/model.safetensors", "out/config.json")
    assert len({oct(os.stat(tmp_path / name).st_mode) for name in names}) == 1


@pytest.mark.parametrize("max_shard_bytes", [None, 20_000])
@pytest.mark.parametrize("layout", ["packed", "per_expert"])
def test_transformers_loads_the_trunk(
    tmp_path: Path, layout: Any, max_shard_bytes: int | None
) -> None:
    from transformers import Qwen4ExpForCausalLM

    config = tiny_config()
    model = random_model(config)
    save_checkpoint(model, config, tmp_path, torch.float32, layout, max_shard_bytes)
    reference, report = Qwen4ExpForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    expected = {n: t for n, t in model.state_dict().items() if not n.startswith("mtp.")}
    actual = reference.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0, msg=name)


def test_loads_what_transformers_writes(tmp_path: Path) -> None:
    from transformers import Qwen4ExpForCausalLM

    config = tiny_config(mtp_num_hidden_layers=0)
    save_checkpoint(random_model(config), config, tmp_path / "ours", torch.float32)
    reference = Qwen4ExpForCausalLM.from_pretrained(tmp_path / "ours")
    reference.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs")
    assert loaded.config == config
    ours, theirs = read_tensors(tmp_path / "ours"), read_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys(), "the packed layout is kept"
    assert_same_state(loaded, load_model(tmp_path / "ours"))
    fresh = Qwen4ExpForCausalLM(reference.config)
    fresh.save_pretrained(tmp_path / "fresh")
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in read_tensors(tmp_path / "fresh")
    trunk = load_model(tmp_path / "fresh").state_dict()
    for name, tensor in fresh.state_dict().items():
        torch.testing.assert_close(trunk[name], tensor, rtol=0, atol=0, msg=name)


def test_loads_what_transformers_writes_for_the_multimodal_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

    text = tiny_config(mtp_num_hidden_layers=0).to_hf_dict()
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    vision = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 2,
        "num_position_embeddings": 4,
    }
    reference = Qwen4ExpForConditionalGeneration(
        Qwen4ExpConfig(text_config=text, vision_config=vision)
    )
    reference.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "outrider"):
        loaded = load_model(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: skipped 21 vision tensors"
    ]
    expected = reference.state_dict()
    for name, tensor in loaded.state_dict().items():
        written = name.replace("model.", "model.language_model.", 1)
        torch.testing.assert_close(tensor, expected[written], rtol=0, atol=0, msg=name)


def test_a_head_survives_a_reload_beside_a_multimodal_configuration(tmp_path: Path) -> None:
    config = tiny_config()
    model = random_model(config)
    save_checkpoint(model, config, tmp_path, torch.float32)

    def nest(value: dict[str, Any]) -> None:
        text = dict(value)
        value.clear()
        text.pop("architectures")
        value.update(
            architectures=["Qwen4ExpForConditionalGeneration"],
            model_type="qwen4_exp",
            text_config=text,
            vision_config={"model_type": "qwen4_exp", "depth": 27},
            tie_word_embeddings=False,
        )

    edit_json(tmp_path / "config.json", nest)
    assert_same_state(load_model(tmp_path, want_mtp=True), model)
