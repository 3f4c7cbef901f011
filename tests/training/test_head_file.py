"""Taking a head out of a checkpoint and putting it into one leaves every other byte alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.weights import has_mtp, load_model, save_checkpoint
from outrider.training import head_file
from outrider.training.head_file import (
    check_new_folder,
    check_same_trunk,
    extract_head,
    save_head,
    stitch_head,
)
from tests.models.tiny_checkpoint import (
    Tensors,
    edit_json,
    edit_tensors,
    random_model,
    read_tensors,
    rename,
    tiny_config,
)

NUM_HEAD_TENSORS = 31


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = tiny_config()
    save_checkpoint(random_model(config), config, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "notes.md").write_text("not part of it")
    return tmp_path / "model"


def head_of(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "mtp." in name}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def perturb(path: Path) -> Tensors:
    """Moves every tensor of a head's file; returns what it holds then."""
    moved = {name: tensor + 1 for name, tensor in load_file(path).items()}
    save_file(moved, path)
    return moved


def test_a_perturbed_head_goes_in_and_nothing_else_changes(
    checkpoint: Path, tmp_path: Path
) -> None:
    before = read_tensors(checkpoint)
    assert extract_head(checkpoint, tmp_path / "head.safetensors") == NUM_HEAD_TENSORS
    assert load_file(tmp_path / "head.safetensors").keys() == head_of(before).keys()
    moved = perturb(tmp_path / "head.safetensors")
    stitch_head(checkpoint, tmp_path / "head.safetensors", tmp_path / "out")
    after = read_tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        expected = moved.get(name, before[name])
        assert tensor.dtype == expected.dtype, name
        assert raw_bytes(tensor) == raw_bytes(expected), name
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (tmp_path / "out" / "config.json").read_bytes() == (
        checkpoint / "config.json"
    ).read_bytes()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert check_same_trunk(checkpoint, tmp_path / "out") == len(before) - NUM_HEAD_TENSORS
    for name in ("", "model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).stat().st_mode == (checkpoint / name).stat().st_mode
    loaded = load_model(tmp_path / "out")
    assert torch.equal(
        loaded.get_parameter("mtp.fc_hidden.weight"), moved["mtp.fc_hidden.weight"].float()
    )


def test_a_round_trip_without_a_change_is_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    extract_head(checkpoint, tmp_path / "head.safetensors")
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    inode = (tmp_path / "out").stat().st_ino
    stitch_head(checkpoint, tmp_path / "head.safetensors", tmp_path / "out")
    assert (tmp_path / "out").stat().st_ino == inode, "a shell in it sees the files"
    before, after = read_tensors(checkpoint), read_tensors(tmp_path / "out")
    assert {name: raw_bytes(tensor) for name, tensor in after.items()} == {
        name: raw_bytes(tensor) for name, tensor in before.items()
    }


def test_a_models_own_head_can_be_saved_and_stitched(checkpoint: Path, tmp_path: Path) -> None:
    model = random_model(tiny_config())
    save_head(model, tmp_path / "head.safetensors", torch.float32)
    stitch_head(checkpoint, tmp_path / "head.safetensors", tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    trunk = load_model(checkpoint, want_mtp=False)
    for name, parameter in loaded.named_parameters():
        owner = model if name.startswith("mtp.") else trunk
        assert torch.equal(parameter, owner.get_parameter(name)), name


def test_several_files_stay_several(tmp_path: Path) -> None:
    config = tiny_config()
    model = random_model(config)
    save_checkpoint(model, config, tmp_path / "model", max_shard_bytes=5_000)
    extract_head(tmp_path / "model", tmp_path / "head.safetensors")
    moved = perturb(tmp_path / "head.safetensors")
    stitch_head(tmp_path / "model", tmp_path / "head.safetensors", tmp_path / "out")
    check_same_trunk(tmp_path / "model", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    written = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == written
    before = {path.name for path in (tmp_path / "model").glob("*.safetensors")}
    assert "mtp.safetensors" in written
    assert written - {"mtp.safetensors"} < before, "a file that held the head alone is gone"
    # A file without a tensor of the head is a copy.
    first = min(before)
    assert (tmp_path / "out" / first).read_bytes() == (tmp_path / "model" / first).read_bytes()
    assert load_model(tmp_path / "out").mtp is not None
    # Once more, into a checkpoint whose head has a file of its own already.
    stitch_head(tmp_path / "out", tmp_path / "head.safetensors", tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").glob("*.safetensors")} == written
    for name, tensor in head_of(read_tensors(tmp_path / "again")).items():
        assert torch.equal(tensor, moved[name]), name


def test_a_checkpoint_without_a_head_gets_one(checkpoint: Path, tmp_path: Path) -> None:
    extract_head(checkpoint, tmp_path / "head.safetensors")
    bare = Path(shutil.copytree(checkpoint, tmp_path / "bare"))

    def drop_head(tensors: Tensors) -> None:
        for name in head_of(tensors):
            del tensors[name]

    edit_tensors(bare, drop_head)
    assert not has_mtp(bare)
    stitch_head(bare, tmp_path / "head.safetensors", tmp_path / "out")
    assert has_mtp(tmp_path / "out")
    assert check_same_trunk(bare, tmp_path / "out") == check_same_trunk(bare, checkpoint)
    with pytest.raises(CheckpointError, match=r"no mtp\.\* tensors, so there is no head"):
        extract_head(bare, tmp_path / "none.safetensors")
    assert not (tmp_path / "none.safetensors").exists()


def test_the_names_of_a_multimodal_checkpoint_are_known(checkpoint: Path, tmp_path: Path) -> None:
    extract_head(checkpoint, tmp_path / "head.safetensors")
    rename(checkpoint, {"model.": "model.language_model.", "mtp.": "model.mtp."})
    stitch_head(checkpoint, tmp_path / "head.safetensors", tmp_path / "out")
    names = read_tensors(tmp_path / "out").keys()
    assert sum("mtp." in name for name in names) == NUM_HEAD_TENSORS
    assert load_model(tmp_path / "out").mtp is not None


def missing(tensors: Tensors) -> None:
    del tensors["mtp.fc_hidden.weight"]


def wrong_shape(tensors: Tensors) -> None:
    tensors["mtp.fc_hidden.weight"] = torch.zeros(16, 17)


def extra(tensors: Tensors) -> None:
    tensors["mtp.fc_more.weight"] = torch.zeros(1)


def of_the_trunk(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.zeros(61, 16)


def empty(tensors: Tensors) -> None:
    tensors.clear()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (missing, r"tensor mtp\.fc_hidden\.weight is missing"),
        (wrong_shape, r"fc_hidden\.weight has shape \[16, 17\], expected \[16, 16\]"),
        (extra, r"unexpected tensor mtp\.fc_more\.weight"),
        (of_the_trunk, r"lm_head\.weight belongs to no MTP head"),
        (empty, r"no mtp\.\* tensors"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    checkpoint: Path, tmp_path: Path, edit: Callable[[Tensors], None], message: str
) -> None:
    path = tmp_path / "head.safetensors"
    extract_head(checkpoint, path)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"head\.safetensors: .*{message}"):
        stitch_head(checkpoint, path, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "head.safetensors"}


def test_a_model_without_a_place_for_a_head_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    extract_head(checkpoint, tmp_path / "head.safetensors")
    edit_json(checkpoint / "config.json", lambda value: value.update(mtp_num_hidden_layers=0))
    with pytest.raises(CheckpointError, match="no place for a head"):
        stitch_head(checkpoint, tmp_path / "head.safetensors", tmp_path / "out")


def test_a_folder_that_holds_something_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    extract_head(checkpoint, tmp_path / "head.safetensors")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(CheckpointError, match=r"out: exists and is not empty; name a new folder"):
        stitch_head(checkpoint, tmp_path / "head.safetensors", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"link: exists and is not empty"):
        stitch_head(checkpoint, tmp_path / "head.safetensors", tmp_path / "link")


def test_what_could_not_be_written_is_told_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "new", tmp_path / "file" / "new" / "one"):
        with pytest.raises(CheckpointError, match=r"new.*: cannot be written: Not a directory"):
            check_new_folder(folder)
    check_new_folder(tmp_path / "new" / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), head_file.SafetensorError("No space left")]
)
def test_a_full_disk_leaves_nothing_behind(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    extract_head(checkpoint, tmp_path / "head.safetensors")
    (tmp_path / "empty").mkdir()

    def no_space(tensors: Tensors, path: Path, metadata: object) -> None:
        path.touch()
        raise error

    monkeypatch.setattr(head_file, "save_file", no_space)
    for name in ("out", "empty"):
        with pytest.raises(
            CheckpointError, match=f"{name}: the checkpoint could not be written: No"
        ):
            stitch_head(checkpoint, tmp_path / "head.safetensors", tmp_path / name)
    (tmp_path / "empty").rmdir()
    with pytest.raises(CheckpointError, match="the head could not be written: No space"):
        extract_head(checkpoint, tmp_path / "other.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "head.safetensors"}


def test_a_trunk_that_differs_is_named(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate.weight"
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    # The least significant bit of one weight.
    edit_tensors(other, lambda tensors: tensors[name].view(torch.int16)[0, 0].bitwise_xor_(1))
    with pytest.raises(CheckpointError, match=f"{name} differs from that in "):
        check_same_trunk(checkpoint, other)
    edit_tensors(other, lambda tensors: tensors.pop(name))
    for pair in ((checkpoint, other), (other, checkpoint)):
        with pytest.raises(CheckpointError, match=f"other: has no tensor {name}"):
            check_same_trunk(*pair)
