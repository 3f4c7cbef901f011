"""How the native kernels are built, and what is said where they cannot be."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import OutriderError
from outrider.ops import native
from tests.ops.sequence_form import HAS_COMPILER


@pytest.fixture(autouse=True)
def fresh_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and nothing enabled before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_enabled", [])
    native.build.cache_clear()


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    with pytest.raises(OutriderError, match=r"no C\+\+ compiler \(c\+\+, g\+\+ or clang\+\+\)"):
        native.enable()
    assert native.kernels(torch.zeros(1)) is None


def test_the_first_line_of_a_failing_compiler_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "error: no such target\nmore\n")

    monkeypatch.setattr(native.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(native.subprocess, "run", fails)
    with pytest.raises(OutriderError, match=r"/bin/c\+\+ fails: error: no such target$"):
        native.enable()


def test_a_cache_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(native.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OutriderError, match=r"no folder to keep them in .*; set XDG_CACHE_HOME$"):
        native.enable()


def test_without_the_variable_they_lie_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native._cache_folder() == tmp_path / ".cache" / "outrider"
    assert (tmp_path / ".cache" / "outrider").stat().st_mode & 0o077 == 0


@native.in_use()
def fail_inside(x: torch.Tensor) -> None:
    assert native.kernels(x) is not None
    raise OutriderError("in the middle")


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_a_block_leaves_them_as_they_were() -> None:
    x = torch.zeros(1)
    with pytest.raises(OutriderError, match="in the middle"):
        fail_inside(x)
    assert native.kernels(x) is None
    native.enable()
    with native.in_use():
        pass
    assert native.kernels(x) is not None


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_a_build_is_kept_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.enable()
    (library,) = tmp_path.rglob("*.so")
    native.disable()
    native.build.cache_clear()
    monkeypatch.setattr(native.subprocess, "run", None)
    native.enable()
    assert list(tmp_path.rglob("*")) == [library.parent, library]
    # They are for float32 on the CPU.
    assert native.kernels(torch.zeros(1)) is not None
    assert native.kernels(torch.zeros(1, dtype=torch.float64)) is None
    assert native.kernels(torch.zeros(1, device="meta")) is None


@pytest.mark.parametrize(
    ("make", "num_inner", "row"),
    [
        (lambda x: x, 1, 24),
        (lambda x: x[..., 3:9], 1, 24),
        (lambda x: x.unflatten(-1, (4, 6)), 2, 24),
        (lambda x: x.unflatten(-1, (4, 6))[:, :, 1:3], 2, 24),
    ],
)
def test_even_rows_are_not_copied(make: Any, num_inner: int, row: int) -> None:
    x = make(torch.arange(3 * 5 * 24).view(3, 5, 24))
    same, stride = native.row_stride(x, num_inner)
    assert same.data_ptr() == x.data_ptr()
    assert stride == row


@pytest.mark.parametrize(
    ("make", "num_inner"),
    [
        (lambda x: x.transpose(0, 1), 1),
        (lambda x: x[:, ::2], 1),  # rows of the second sequence do not follow those of the first
        (lambda x: x[..., ::2], 1),
        (lambda x: x.unflatten(-1, (4, 6))[..., 1:], 2),
        (lambda x: x.unflatten(-1, (4, 6)).transpose(-1, -2), 2),
    ],
)
def test_uneven_rows_are_copied(make: Any, num_inner: int) -> None:
    x = make(torch.arange(3 * 5 * 24).view(3, 5, 24))
    copy, stride = native.row_stride(x, num_inner)
    assert copy.is_contiguous()
    assert torch.equal(copy, x)
    assert stride == x.shape[-num_inner:].numel()
