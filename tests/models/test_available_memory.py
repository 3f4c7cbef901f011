"""The memory at hand: the least of what the machine and the control groups have left."""

from pathlib import Path

import pytest
import torch

from outrider.models.qwen4_exp import available_memory as module
from outrider.models.qwen4_exp.available_memory import available_memory

CPU = torch.device("cpu")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "_OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(module, "_CGROUP_ROOT", tmp_path / "fs")
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    5000 kB\n")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_machine_without_control_groups(system: Path) -> None:
    assert available_memory(CPU) == 5000 * 1024


def test_unknown_platform(system: Path) -> None:
    (system / "meminfo").unlink()
    assert available_memory(CPU) is None
    assert available_memory(torch.device("meta")) is None


def test_unified_groups_and_their_parents(system: Path) -> None:
    (system / "cgroup").write_text("0::/a/b\n")
    write(system / "fs/a", memory__max=4_000_000, memory__current=3_000_000)
    write(system / "fs/a/b", memory__max="max", memory__current=2_000_000)
    assert available_memory(CPU) == 1_000_000
    stat = "anon 5\ninactive_file 500000\nactive_file 7"
    write(system / "fs/a", memory__stat=stat)
    assert available_memory(CPU) == 1_500_000


def test_inside_a_container_the_limit_lies_at_the_root(system: Path) -> None:
    (system / "cgroup").write_text("0::/not/visible\n")
    write(system / "fs", memory__max=3_000_000, memory__current=1_000_000)
    assert available_memory(CPU) == 2_000_000


def test_first_version_of_the_groups(system: Path) -> None:
    (system / "cgroup").write_text("5:cpu:/a\n4:cpuset,memory:/a\n0::/\n")
    files = {"memory__limit_in_bytes": 3_000_000, "memory__usage_in_bytes": 2_900_000}
    write(system / "fs/memory/a", **files, memory__stat="total_inactive_file 100000")
    assert available_memory(CPU) == 200_000


def test_a_group_over_its_limit_has_nothing_left(system: Path) -> None:
    (system / "cgroup").write_text("0::/\n")
    write(system / "fs", memory__max=1, memory__current=2)
    assert available_memory(CPU) == 0


def test_this_machine() -> None:
    amount = available_memory(CPU)
    assert amount is None or amount > 0
