"""Distributions are read in place; what cannot be fetched or read is named in a line."""

import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from outrider.errors import OutriderError
from outrider.training import archives
from outrider.training.archives import declared_licence, fetch, read_members
from outrider.training.recipe import Source


def source(kind: str, name: str = "a") -> Source:
    return Source(name, kind, "MIT", "code", "1.0", include=("a/*.py",))


def wheel(folder: Path, metadata: str) -> Path:
    path = folder / "a-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/z.py", "z")
        archive.writestr("a/b.py", "b")
        archive.writestr("a/b.so", "\0")
        archive.writestr("a-1.0.dist-info/METADATA", f"Name: a\n{metadata}\n\ntext\n")
    return path


def tar(folder: Path, top: str, files: dict[str, str]) -> Path:
    path = folder / "a-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_a_wheel_and_a_source_archive_are_read_alike(tmp_path: Path) -> None:
    files = {"a/z.py": "z", "a/b.py": "b", "setup.py": "s", "PKG-INFO": "License: MIT\n\n"}
    expected = [("a/b.py", b"b"), ("a/z.py", b"z")]
    assert list(read_members(wheel(tmp_path, ""), source("wheel"))) == expected
    assert list(read_members(tar(tmp_path, "a-1.0", files), source("sdist"))) == expected


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: MIT\nLicense: something", "MIT"),
        ("License: BSD", "BSD"),
        (
            f"License: {'whole text ' * 9}\nClassifier: License :: OSI Approved :: MIT License",
            "MIT License",
        ),
        ("Summary: nothing", ""),
    ],
)
def test_the_licence_is_what_the_metadata_says(tmp_path: Path, metadata: str, licence: str) -> None:
    assert declared_licence(wheel(tmp_path, metadata), source("wheel")) == licence


def test_the_licence_of_other_archives(tmp_path: Path) -> None:
    # A source archive of Python may hold a package.json of its own.
    files = {"PKG-INFO": "License-Expression: ISC\n\n", "package.json": "{}"}
    assert declared_licence(tar(tmp_path, "a-1.0", files), source("sdist")) == "ISC"
    files = {"package.json": json.dumps({"license": "CC0-1.0"})}
    assert declared_licence(tar(tmp_path, "package", files), source("npm")) == "CC0-1.0"
    with pytest.raises(OutriderError, match="has no metadata"):
        declared_licence(tar(tmp_path, "a-1.0", {"setup.py": ""}), source("sdist"))


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    folder = tmp_path / "npm" / "@b-a-1.0"
    folder.mkdir(parents=True)
    path = tar(folder, "package", {})
    assert fetch(source("npm", "@b/a"), tmp_path) == path
    (folder / "second").touch()
    with pytest.raises(OutriderError, match="2 files where one distribution is expected"):
        fetch(source("npm", "@b/a"), tmp_path)


def test_the_clients_are_asked_for_one_exact_version() -> None:
    target = Path("folder")
    assert archives._command(source("npm"), target)[-1] == "a@1.0"
    for kind, form in (("wheel", "--only-binary"), ("sdist", "--no-binary")):
        command = archives._command(source(kind), target)
        assert command[-1] == "a==1.0"
        assert {form, "--no-deps"} <= set(command)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["outrider-no-such-program"], "the program outrider-no-such-program is not installed"),
        ([sys.executable, "-c", "exit('first\\nlast line')"], "cannot be fetched: last line"),
        ([sys.executable, "-c", "exit(3)"], "cannot be fetched: exit code 3"),
    ],
)
def test_a_failed_fetch_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], message: str
) -> None:
    monkeypatch.setattr(archives, "_command", lambda *_: command)
    with pytest.raises(OutriderError, match=rf"^a-1\.0: {message}$"):
        fetch(source("npm"), tmp_path)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    for name in ("a.whl", "a.tar.gz"):
        (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises(OutriderError, match=rf"{name}: cannot be read"):
            declared_licence(tmp_path / name, source("wheel"))
    whole = tar(tmp_path, "a-1.0", {"a/b.py": "b", "PKG-INFO": "License: MIT\n\n"})
    whole.write_bytes(whole.read_bytes()[:90])
    with pytest.raises(OutriderError, match=r"a-1\.0\.tar\.gz: cannot be read \(.*ended before"):
        declared_licence(whole, source("sdist"))
    whole = wheel(tmp_path, "License: MIT")
    whole.write_bytes(whole.read_bytes().replace(b"License: MIT", b"License: ISC"))
    with pytest.raises(OutriderError, match=r"any\.whl: cannot be read \(Bad CRC"):
        declared_licence(whole, source("wheel"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"index.js": ""}, "has no package.json"),
        ({"package.json": "{"}, "package.json: no valid JSON object"),
        ({"package.json": "[]"}, "package.json: no valid JSON object"),
    ],
)
def test_a_package_without_metadata_is_named(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    with pytest.raises(OutriderError, match=rf"a-1\.0\.tar\.gz: {message}"):
        declared_licence(tar(tmp_path, "package", files), source("npm"))
