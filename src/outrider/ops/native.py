"""Native kernels of the differentiable ops, built from the C++ beside them when asked for.

Training is bound by memory and by the number of small operations; a fused loop over rows in the
cache does in one call what costs tens of passes as tensor operations. Nothing needs them: without
`enable` every op runs as tensor operations, with the same formulas, on any device and dtype.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.config.cache_folder import user_cache_folder
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from collections.abc import Generator

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
)
_WIDE = "-mprefer-vector-width=512"  # known to compilers for x86 alone


class Kernels:
    """The functions of the built library, called with tensors and numbers.

    Args:
        path: of the library.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.num_threads.restype = ctypes.c_int64
        self._library.set_sgemm(ctypes.cast(_torch_library().sgemm_, ctypes.c_void_p))

    @property
    def num_threads(self) -> int:
        """How many threads a call uses: as many as torch, in the thread that asks."""
        return int(self._library.num_threads())

    def __call__(self, name: str, *arguments: Tensor | float | None) -> None:
        """Calls a kernel.

        Args:
            name: of the function.
            arguments: float32 or int64 tensors of this machine, contiguous where the kernel takes
                no stride; integers (passed as 64 bits), floats (as 32), or None for no tensor.
        """
        getattr(self._library, name)(*map(_as_c, arguments))


def _as_c(argument: object) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    assert isinstance(argument, float), "kernels take tensors and numbers"
    return ctypes.c_float(argument)


_enabled: list[Kernels] = []


def enable() -> None:
    """Builds the kernels, or takes them from the cache, and makes the ops of this process use them.

    Raises:
        OutriderError: as `build`, or torch lends no matrix product.
    """
    if not _enabled:
        _enabled.append(Kernels(build()))


def disable() -> None:
    """Makes the ops of this process run as tensor operations again."""
    _enabled.clear()


@contextmanager
def in_use() -> Generator[None]:
    """Enables the kernels inside the block, and leaves them as they were before it.

    Raises:
        OutriderError: as `enable`.
    """
    before = list(_enabled)
    enable()
    try:
        yield
    finally:
        _enabled[:] = before


def kernels(x: Tensor) -> Kernels | None:
    """The kernels, where they are enabled and `x` is what they work on."""
    if _enabled and x.dtype == torch.float32 and x.is_cpu:
        return _enabled[0]
    return None


def over_threads(copies: Tensor) -> Tensor:
    """Sums [threads, ...], the accumulators of a kernel, in the order of the threads."""
    total = copies[0]
    for other in copies[1:]:
        total += other
    return total


def row_stride(x: Tensor, num_inner: int = 1) -> tuple[Tensor, int]:
    """The tensor, copied unless its rows are dense and equally far apart, and their distance.

    Args:
        x: [..., *inner], the last `num_inner` dimensions being a row.
        num_inner: how many.
    """
    width = x.shape[-num_inner:].numel()
    if x.stride(-1) == 1:
        try:
            return x, x.view(-1, width).stride(0)
        except RuntimeError:  # no view: rows have holes, or do not follow each other evenly
            pass
    return x.contiguous(), width


def _torch_library() -> ctypes.CDLL:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        library.sgemm_  # noqa: B018 - looks the symbol up
    except (OSError, AttributeError) as error:
        raise OutriderError(f"native kernels: {path} has no sgemm_ to lend ({error})") from error
    return library


@functools.cache
def build() -> Path:
    """Builds the library, unless the cache has it, and enables nothing.

    Returns:
        Where it lies.

    Raises:
        OutriderError: there is no C++ compiler, it fails, or there is no place for the library.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OutriderError("native kernels: no C++ compiler (c++, g++ or clang++) on the path")
    flags = [*_FLAGS, *([_WIDE] if os.uname().machine == "x86_64" else [])]
    digest = hashlib.sha256(repr((compiler, flags, _cpu_flags())).encode())
    sources = [*sorted(_FOLDER.rglob("*.cpp")), _FOLDER / "native.h"]
    for source in sources:
        digest.update(source.read_bytes())
    library = _cache_folder() / f"kernels-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        units = [str(source) for source in sources if source.suffix == ".cpp"]
        part = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *flags, *units, "-o", str(part)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            reason = (result.stderr.strip() or "no message").splitlines()[0]
            raise OutriderError(f"native kernels: {compiler} fails: {reason}")
        part.replace(library)
    return library


def _cache_folder() -> Path:
    """The user's own, since what lies there is run."""
    try:
        folder = user_cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise OutriderError(
            f"native kernels: no folder to keep them in ({error}); set XDG_CACHE_HOME"
        ) from error
    if not os.access(folder, os.W_OK):
        raise OutriderError(f"native kernels: {folder} is not writable; set XDG_CACHE_HOME")
    if folder.stat().st_uid != os.getuid():
        raise OutriderError(f"native kernels: {folder} belongs to somebody else")
    return folder


def _cpu_flags() -> str:
    """What `-march=native` depends on: a cached build must not outlive its machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return os.uname().machine
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
