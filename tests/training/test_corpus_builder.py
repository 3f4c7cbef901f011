"""A corpus of two small packages: held-out files stand nowhere else, copies are left out."""

import json
import zipfile
from pathlib import Path

import pytest

from outrider.errors import OutriderError
from outrider.training import corpus_builder
from outrider.training.corpus_builder import build, check_licence, write
from outrider.training.documents import Document, read_documents
from outrider.training.recipe import Recipe, Source


def module(name: str, num_functions: int = 4) -> str:
    """Python whose every line names the module, in functions long enough to be cut."""
    functions = []
    for number in range(num_functions):
        body = "".join(
            f"    {name}_{number}_{line} = compute_{name}({line})\n" for line in "abcdefghij"
        )
        functions.append(f"def {name}_{number}():\n{body}    return {name}_{number}_a\n")
    return "\n\n".join(functions)


def page(name: str, num_lines: int = 80) -> str:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    return "".join(
        f"The {name} page says {words[i % 10]} and {words[i // 10]} of it.\n"
        for i in range(num_lines)
    )


def add_package(cache: Path, name: str, files: dict[str, str], licence: str = "MIT") -> None:
    folder = cache / "wheel" / f"{name}-1.0"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"License-Expression: {licence}\n\n")


MODULES = {f"a/{name}.py": module(name) for name in ("bear", "crow", "deer", "finch", "goat")}
# Five whole copies and one file of its own, each with another first line.
COPIES = {path.replace("a/", "b/"): "# b\n" + text for path, text in MODULES.items()}
CODE_A = Source("a", "wheel", "MIT", "code", "1.0", include=("a/*.py",), num_held_out=2)
PROSE_A = Source("a", "wheel", "MIT", "prose", "1.0", include=("*.rst",), num_held_out=1)
CODE_B = Source("b", "wheel", "MIT", "code", "1.0", include=("b/*.py",))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    pages = {f"docs/{name}.rst": page(name) for name in ("hen", "ibis")}
    add_package(tmp_path, "a", {**MODULES, **pages, "a/short.py": "pass\n"})
    add_package(tmp_path, "b", {"b/zebra.py": module("zebra")})
    return tmp_path


def sources(documents: list[Document]) -> set[str]:
    return {document.source for document in documents}


def read(path: Path) -> list[Document]:
    return read_documents("corpus", (path,), ())


def test_files_are_divided_and_told(cache: Path, tmp_path: Path) -> None:
    portions = build(Recipe((CODE_A, PROSE_A, CODE_B)), cache)
    content = write(portions, tmp_path / "out")
    train = read(tmp_path / "out" / "train.jsonl")
    code = read(tmp_path / "out" / "held_out_code.jsonl")
    prose = read(tmp_path / "out" / "held_out_prose.jsonl")
    assert (len(train), len(code), len(prose)) == (3 + 1 + 1, 2, 1)
    assert sources(code) < {f"a-1.0/{path}" for path in MODULES}
    assert not sources(train) & sources(code + prose)
    texts = {f"a-1.0/{path}": text for path, text in MODULES.items()}
    assert all(document.text == texts[document.source] for document in code)
    assert json.loads((tmp_path / "out" / "provenance.json").read_text()) == content
    entry = content["sources"][0]
    assert (entry["licence"], entry["declared_licence"]) == ("MIT", "MIT")
    assert entry["documents"] == 3
    assert set(entry["held_out"]) == sources(code)
    assert entry["left_out"] == {"size": 1}
    suites = content["suites"]
    assert suites["code"]["held_out"]["documents"] == 2
    assert suites["code"]["held_out_passages_in_train"] == 0.0
    assert suites["prose"]["train"]["bytes"] == sum(
        len(document.text.encode()) for document in train if document.source.endswith(".rst")
    )


def test_the_same_recipe_gives_the_same_files(cache: Path, tmp_path: Path) -> None:
    recipe = Recipe((CODE_A, PROSE_A))
    for name in ("first", "second"):
        write(build(recipe, cache), tmp_path / name)
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_copies_are_neither_held_out_nor_trained_on_twice(cache: Path) -> None:
    add_package(cache, "c", {path.replace("b/", "c/"): text for path, text in COPIES.items()})
    copies = Source("c", "wheel", "MIT", "code", "1.0", include=("c/*.py",))
    first, second = build(Recipe((Source(**{**vars(CODE_A), "num_held_out": 0}), copies)), cache)
    assert len(first.train) == 5
    assert second.train == []
    assert second.num_left_out == {"copy": 5}
    with pytest.raises(OutriderError, match=r"^a-1\.0: num_held_out: 2 files to hold out are more"):
        build(Recipe((CODE_A, copies)), cache)


def test_copies_of_held_out_modules_are_not_trained_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collect(*, held_out: bool = False) -> list[Document]:
        name = "lynx" if held_out else "mole"
        return [Document(f"{name}.py", module(name))]

    monkeypatch.setattr(corpus_builder, "collect_documents", collect)
    # Another name, and functions of its own behind the copy.
    add_package(cache, "d", {"d/parts.py": module("lynx") + "\n\n" + module("parts", 20)})
    stdlib = Source("python", "stdlib", "PSF-2.0", "code")
    copy = Source("d", "wheel", "MIT", "code", "1.0", include=("d/*.py",))
    first, second = build(Recipe((stdlib, copy)), cache)
    assert sources([c.document for c in first.held_out]) == {"lynx.py"}
    assert sources([c.document for c in first.train]) == {"mole.py"}
    assert second.train == []
    assert second.num_left_out == {"held out elsewhere": 1}


def test_what_stands_in_another_file_in_part_is_not_held_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A quarter of each module is the end of this file.
    parts = [text[text.rindex("def") :] for text in MODULES.values()]
    add_package(cache, "d", {"d/parts.py": module("parts", 6) + "\n\n" + "\n\n".join(parts)})
    patchwork = Source("d", "wheel", "MIT", "code", "1.0", include=("d/*.py",))
    with pytest.raises(OutriderError, match="num_held_out"):
        build(Recipe((CODE_A, patchwork)), cache)
    monkeypatch.setattr(corpus_builder, "MAX_LEAKED", 0.3)
    first, second = build(Recipe((CODE_A, patchwork)), cache)
    assert (len(first.held_out), len(second.train)) == (2, 1)


def test_max_bytes_bounds_a_source(cache: Path) -> None:
    size = max(len(text.encode()) for text in MODULES.values())
    source = Source(**{**vars(CODE_A), "num_held_out": 0, "max_bytes": 2 * size + 10})
    (portion,) = build(Recipe((source,)), cache)
    assert len(portion.train) == 2
    assert portion.num_left_out["over max_bytes"] == 3


@pytest.mark.parametrize(
    ("licence", "declared", "agrees"),
    [
        ("MIT", "MIT", True),
        ("MIT", "MIT License", True),
        ("BSD-3-Clause", "BSD", True),
        ("Apache-2.0", "Apache License, Version 2.0", True),
        ("BSD-3-Clause", "BSD-2-Clause", False),
        ("MIT", "Apache-2.0 AND MIT", False),
        ("MIT", "MIT AND GPL-3.0-or-later", False),
        ("MIT", "", False),
    ],
)
def test_licences_are_compared(licence: str, declared: str, agrees: bool) -> None:
    source = Source("a", "wheel", licence, "code", "1.0", include=("*",))
    if agrees:
        check_licence(source, declared)
    else:
        with pytest.raises(OutriderError, match=rf"^a-1\.0: the recipe says {licence}, its meta"):
            check_licence(source, declared)


RECIPE = """\
[[source]]
name = "a"
kind = "wheel"
licence = "MIT"
suite = "code"
version = "1.0"
include = ["*.py"]
"""


def test_what_cannot_be_built_is_told_in_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(output_dir: Path) -> str:
        assert corpus_builder.main([str(output_dir), "--recipe", str(recipe)]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ")
        assert told.count("\n") == 1
        return told

    recipe = tmp_path / "recipe.toml"
    assert "recipe.toml: cannot be read" in fails(tmp_path)
    recipe.write_text(RECIPE)
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file/packages/wheel/a-1.0: Not a directory" in fails(tmp_path / "file")

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "packages").symlink_to(cache)
    monkeypatch.setattr(corpus_builder, "write_json_lines", no_space)
    assert fails(tmp_path / "out") == f"error: {tmp_path}/out: No space left on device\n"
