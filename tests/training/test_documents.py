"""Texts are read from files, folders and lines of JSON; what cannot be read is named in a line."""

import json
from pathlib import Path

import pytest

from outrider.errors import OutriderError
from outrider.training.documents import Document, read_documents, write_json_lines

SUFFIXES = (".py", ".md")


def read(*paths: Path) -> list[Document]:
    return read_documents("data.train", paths, SUFFIXES)


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b/z.py", "b/a.md", "a.py", "c.txt", ".git/x.py", "b/.x.py", "blank.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(" \n" if name == "blank.py" else name)
    sources = [(tmp_path / name).as_posix() for name in ("a.py", "b/a.md", "b/z.py")]
    documents = read(tmp_path)
    assert [document.source for document in documents] == sources
    assert [document.text for document in documents] == ["a.py", "b/a.md", "b/z.py"]


def test_a_file_that_is_named_is_read_whatever_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_bytes(b"x\r\ny")
    (tmp_path / "a.py").write_text("a")
    paths = (tmp_path / "c.txt", tmp_path / "a.py")
    assert [document.text for document in read(*paths)] == ["x\r\ny", "a"]


def test_lines_of_json_come_back_as_they_were_written(tmp_path: Path) -> None:
    documents = [Document("a.py", "é\u2028\r\n\t'\"\\\x00"), Document("b", "x\n")]
    write_json_lines(tmp_path / "texts.jsonl", documents)
    assert read(tmp_path / "texts.jsonl") == documents


def test_a_line_without_a_source_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('\n{"text": "a", "licence": "MIT"}\n')
    assert read(path) == [Document(f"{path}: line 2", "a")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no valid JSON: "),
        ("[" * 100_000, "line 2: no valid JSON: nested too deep"),
        ("[]", r"line 2: must be an object such as .*, got \[\]"),
        ('{"texts": "a"}', "line 2: must be an object"),
        ('{"text": 5}', "line 2: must be an object"),
        ('{"text": "a", "source": null}', "line 2: must be an object"),
        ('{"text": "a\\ud800"}', r"line 2: no valid Unicode text: '\\ud800' at character 1"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": "first"}) + "\n" + line + "\n")
    with pytest.raises(OutriderError, match=rf"^{path}: {message}"):
        read(path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match=rf"^data\.train: {tmp_path}/x: no such file or folder"):
        read(tmp_path / "x")
    with pytest.raises(
        OutriderError, match=rf"^data\.train: no text in {tmp_path} \(in folders: \.py \.md\)$"
    ):
        read(tmp_path)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(OutriderError, match=rf"^{tmp_path}/latin\.py: not UTF-8 text \(byte 2\)$"):
        read(tmp_path)
