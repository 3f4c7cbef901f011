"""Memory that can be allocated on a device at this moment."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the platform does not say.

    On the host it is the smaller of what the machine and what the process's control groups have
    left. Cached file pages count as free in both: the kernel drops them when it needs to.
    """
    if device.type == "cpu":
        known = [amount for amount in (_host_memory(), *_cgroup_headrooms()) if amount is not None]
        return min(known, default=None)
    if device.type == "meta":
        return None
    mem_get_info = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if mem_get_info is None else int(mem_get_info(device)[0])


def _host_memory() -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(_MEMINFO) or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _cgroup_headrooms() -> list[int | None]:
    """Limit minus use of every control group of this process, both versions of the interface."""
    result = []
    for line in (_read(_OWN_CGROUPS) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUP_ROOT, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUP_ROOT / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A parent's limit binds its children. Inside a container the path may not be visible,
        # and the group's own files then lie at the root.
        own = root / path.strip("/")
        folders = [own, *own.parents]
        result += [_headroom(folder, *names) for folder in folders[: folders.index(root) + 1]]
    return result


def _headroom(folder: Path, limit_name: str, usage_name: str, cache_key: str) -> int | None:
    limit, usage = _read(folder / limit_name), _read(folder / usage_name)
    # "max" stands for no limit.
    if limit is None or usage is None or not limit.strip().isdigit():
        return None
    cached = re.search(rf"^{cache_key} (\d+)$", _read(folder / "memory.stat") or "", re.MULTILINE)
    return max(0, int(limit) - int(usage) + (int(cached[1]) if cached else 0))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
