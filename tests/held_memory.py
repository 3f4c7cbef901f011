"""What this process holds: tensors, objects of any kind, pages."""

import gc
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

STATM = Path("/proc/self/statm")


@dataclass
class Held:
    """What the process holds while no request is there.

    Attributes:
        num_tensors: of torch.
        num_objects: that the collector looks after.
        resident_mib: pages in memory.
    """

    num_tensors: int
    num_objects: int
    resident_mib: float

    @classmethod
    def measure(cls) -> "Held":
        """Collects what is garbage, and counts."""
        gc.collect()
        objects = gc.get_objects()
        # By type: torch.is_tensor asks an object for its class, which some answer with an import.
        num_tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
        pages = int(STATM.read_text().split()[1])
        return cls(num_tensors, len(objects), pages * os.sysconf("SC_PAGESIZE") / (1 << 20))


def count_objects(*classes: type) -> dict[str, int]:
    """How many objects of exactly these classes are alive, by name."""
    gc.collect()
    counts = Counter(type(one) for one in gc.get_objects())
    return {one.__name__: counts[one] for one in classes}
