"""Where a measurement comes from: code, versions, machine and command line."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("outrider", "torch", "numpy", "tokenizers", "safetensors")


def provenance(device: str, dtype: str) -> dict[str, Any]:
    """What a reader needs to repeat the measurement, as JSON."""
    return {
        "git_sha": _git("rev-parse", "HEAD"),
        # Numbers of a tree with changes belong to no commit.
        "is_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in _PACKAGES},
        },
        "argv": sys.argv,
        "device": device,
        "device_name": _device_name(device),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git(*arguments: str) -> str | None:
    """Output of git in this checkout; None outside of one."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def _device_name(device: str) -> str:
    if device != "cpu":
        module = getattr(torch, torch.device(device).type)
        return str(module.get_device_name(torch.device(device)))
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
