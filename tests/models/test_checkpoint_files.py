"""A damaged or hostile file ends as one line that names it, before a library maps it."""

import contextlib
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from outrider.errors import CheckpointError
from outrider.models.qwen4_exp.checkpoint_files import list_tensors, read_header

Header = dict[str, Any]


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


A = "model.a.weight"
EIGHT = bytes(8)
TWICE = b'{"model.a.weight": 1, "model.a.weight": 2}'
BROKEN_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"\0" * 7, "truncated"),
    "header past the end": (struct.pack("<Q", 9) + b"{}", "truncated"),
    "header of 2^63": (struct.pack("<Q", 1 << 63) + b"{}", "truncated"),
    "data cut off": (safetensors_bytes({A: entry()}, bytes(7)), f"truncated: {A} ends at byte 8"),
    "no JSON": (safetensors_bytes(b"{'a': 1}"), "no valid JSON"),
    "no text": (safetensors_bytes(b"\xff\xfe"), "no valid JSON"),
    "nested": (safetensors_bytes(b"[" * 100_000), "no valid JSON"),
    "a list": (safetensors_bytes([]), "must be a JSON object"),
    "name twice": (safetensors_bytes(TWICE), "names 'model.a.weight' twice"),
    "metadata": (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "name with a slash": (
        safetensors_bytes({"model/../../etc/passwd": entry()}, EIGHT),
        "'model/../../etc/passwd' is no valid tensor name",
    ),
    "name with dots": (safetensors_bytes({"a..b": entry()}, EIGHT), "'a..b' is no valid tensor"),
    "name with an escape": (
        safetensors_bytes({"a\x1b[2J": entry()}, EIGHT),
        r"'a\x1b[2J' is no valid tensor name",
    ),
    "empty name": (safetensors_bytes({"": entry()}, EIGHT), "'' is no valid tensor name"),
    "long name": (safetensors_bytes({"a" * 600: entry()}, EIGHT), "is no valid tensor name"),
    "entry": (safetensors_bytes({A: [1]}), f"the entry of {A}"),
    "entry with more": (safetensors_bytes({A: {**entry(), "x": 1}}, EIGHT), f"the entry of {A}"),
    "dtype": (safetensors_bytes({A: entry("F33")}, EIGHT), f"{A} has the unknown dtype 'F33'"),
    "dtype is a list": (safetensors_bytes({A: entry(["F32"])}, EIGHT), "unknown dtype ['F32']"),
    "negative shape": (safetensors_bytes({A: entry(shape=[-2])}, EIGHT), f"data_offsets of {A}"),
    "shape of bool": (safetensors_bytes({A: entry(shape=[True, 2])}, EIGHT), "lists of sizes"),
    "shape of float": (safetensors_bytes({A: entry(shape=[2.0])}, EIGHT), "lists of sizes"),
    "huge shape": (safetensors_bytes({A: entry(shape=[1 << 60])}, EIGHT), "lists of sizes"),
    "many dimensions": (
        safetensors_bytes({A: entry(shape=[1 << 47] * 500)}, EIGHT),
        "lists of sizes",
    ),
    "three offsets": (safetensors_bytes({A: entry(offsets=[0, 8, 9])}, EIGHT), "lists of sizes"),
    "backwards": (safetensors_bytes({A: entry(offsets=[8, 0])}, EIGHT), f"{A} spans -8 bytes"),
    "size": (safetensors_bytes({A: entry(shape=[3])}, EIGHT), "[3] needs 12"),
    "overlap": (
        safetensors_bytes({A: entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
        "b starts at byte 4, expected 8: tensors overlap",
    ),
    "hole": (
        safetensors_bytes({A: entry(), "b": entry(offsets=[12, 20])}, bytes(20)),
        "b starts at byte 12, expected 8",
    ),
    "bytes too many": (safetensors_bytes({A: entry()}, bytes(9)), "1 bytes belong to no tensor"),
}


@pytest.mark.parametrize(("content", "phrase"), BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_broken_file(tmp_path: Path, content: bytes, phrase: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(phrase)) as error:
        list_tensors(tmp_path)
    assert str(error.value).startswith(f"{path}: ")
    assert str(error.value).isprintable()


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({A: torch.ones(3), "model.b": torch.ones(0)}, path)
    whole = path.read_bytes()
    assert len(list_tensors(tmp_path)) == 2
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            list_tensors(tmp_path)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_bytes_end_in_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    good = safetensors_bytes({"__metadata__": {"format": "pt"}, A: entry()}, EIGHT)
    content = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    with contextlib.suppress(CheckpointError):
        assert sum(tensor.num_bytes for tensor in read_header(path)) == 8


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"model.a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"model.b": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    index = {
        "metadata": {"total_size": 16},
        "weight_map": {
            "model.a": "model-00001-of-00002.safetensors",
            "model.b": "model-00002-of-00002.safetensors",
        },
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_sharded(sharded: Path) -> None:
    assert [tensor.name for tensor in list_tensors(sharded)] == ["model.a", "model.b"]


def test_symbolic_links_are_followed(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A hub cache holds links into a folder of blobs."""
    cache = tmp_path_factory.mktemp("cache")
    for path in sharded.iterdir():
        (cache / path.name).symlink_to(path)
    assert len(list_tensors(cache)) == 2
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors: missing \(1 of 2"
    ):
        list_tensors(cache)


BROKEN_INDEXES: dict[str, tuple[object, str]] = {
    "no JSON": ("{", "index.json: no valid JSON at line 1 column 2"),
    "a list": ([], "index.json: must hold a JSON object, got list"),
    "no map": ({"metadata": {}}, "index.json: weight_map must be an object"),
    "empty map": ({"weight_map": {}}, "index.json: weight_map must be an object"),
    "no name": ({"weight_map": {"model.a": 1}}, "'model.a' lies in 1, which is no plain"),
    "parent": ({"weight_map": {"model.a": "../x.safetensors"}}, "'../x.safetensors', which is no"),
    "folder": ({"weight_map": {"model.a": "a/x.safetensors"}}, "'a/x.safetensors', which is no"),
    "absolute": ({"weight_map": {"a": "/etc/x.safetensors"}}, "'/etc/x.safetensors', which is no"),
    "backslash": ({"weight_map": {"a": "a\\x.safetensors"}}, "which is no plain"),
    "zero byte": ({"weight_map": {"a": "a\0.safetensors"}}, "which is no plain"),
    "other kind": ({"weight_map": {"a": "model.bin"}}, "'model.bin', which is no plain"),
    "hidden": ({"weight_map": {"a": "..safetensors"}}, "'..safetensors', which is no plain"),
    "not in its file": (
        {
            "weight_map": {
                "model.a": "model-00001-of-00002.safetensors",
                "model.b": "model-00002-of-00002.safetensors",
                "model.c": "model-00002-of-00002.safetensors",
            }
        },
        "model-00002-of-00002.safetensors: tensor 'model.c' is not in this file",
    ),
    "not listed": (
        {
            "weight_map": {
                "model.a": "model-00001-of-00002.safetensors",
                "model.x": "model-00002-of-00002.safetensors",
            }
        },
        "model-00002-of-00002.safetensors: model.b is not listed in model.safetensors.index.json",
    ),
    "in the other file": (
        {
            "weight_map": {
                "model.a": "model-00002-of-00002.safetensors",
                "model.b": "model-00001-of-00002.safetensors",
            }
        },
        "model-00001-of-00002.safetensors: model.a is listed in model-00002-of-00002.safetensors",
    ),
    "a name that no file can have": (
        {"weight_map": {"model.a": "a" * 300 + ".safetensors"}},
        "aaa..., which is no plain *.safetensors file name",
    ),
}


@pytest.mark.parametrize(("index", "phrase"), BROKEN_INDEXES.values(), ids=BROKEN_INDEXES.keys())
def test_broken_index(sharded: Path, index: object, phrase: str) -> None:
    text = index if isinstance(index, str) else json.dumps(index)
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(phrase)) as error:
        list_tensors(sharded)
    assert str(error.value).startswith(str(sharded))
    assert str(error.value).isprintable()


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def leave_only(name: str) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        (folder / name).touch()

    return apply


@pytest.mark.parametrize(
    ("damage", "phrase"),
    [
        (remove("model.safetensors.index.json"), "index.json is missing, but shards are there"),
        (
            remove("model-00001-of-00002.safetensors"),
            "model-00001-of-00002.safetensors: missing (1",
        ),
        (leave_only("pytorch_model.bin"), "model.safetensors is missing; only safetensors is read"),
        (leave_only("config.json"), "neither model.safetensors nor model.safetensors.index.json"),
        (lambda f: (f / "model.safetensors").mkdir(), "model.safetensors: missing or no regular"),
        (lambda f: os.mkfifo(f / "model.safetensors"), "model.safetensors: missing or no regular"),
        (
            lambda f: (f / "model.safetensors").symlink_to("gone"),
            "model.safetensors: missing or no",
        ),
    ],
)
def test_incomplete_download(sharded: Path, damage: Callable[[Path], object], phrase: str) -> None:
    damage(sharded)
    with pytest.raises(CheckpointError, match=re.escape(phrase)):
        list_tensors(sharded)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint directory"):
        list_tensors(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        list_tensors(tmp_path / ("a" * 300))
