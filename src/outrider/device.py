"""Which devices torch sees; apart from the configuration, so that reading that imports no torch."""

from __future__ import annotations

import torch


def is_device_name(name: object) -> bool:
    """Whether torch knows the name, such as "cpu" or "cuda:1", on whatever machine."""
    try:
        return isinstance(name, str) and bool(torch.device(name))
    except RuntimeError:
        return False


def is_present(name: str) -> bool:
    """Whether the device is there."""
    device = torch.device(name)
    if device.type == "cpu":
        return True
    module = getattr(torch, device.type, None)
    if module is None or not module.is_available():
        return False
    return (device.index or 0) < int(module.device_count())


def default_device() -> str:
    """The accelerator that torch sees, or else the CPU.

    Not one without float64, in which random numbers are drawn.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":
        return "cpu"
    return accelerator.type
