"""Compiles the element-wise parts of a model, which take most of a training step on a CPU.

The work on the four streams is many passes over memory; one fused loop does each in a fraction of
the time. What routes tokens to experts stays eager: its shapes change with every batch.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import torch

from outrider.models.qwen4_exp.gated_delta_net import GatedDeltaNet
from outrider.models.qwen4_exp.hyper_connection import HyperConnection

if TYPE_CHECKING:
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

_HOT_METHODS = (
    (HyperConnection, "read"),
    (HyperConnection, "inject"),
    (GatedDeltaNet, "forward_sequence"),
)


def compile_hot_methods(model: Qwen4ExpForCausalLM) -> None:
    """Gives every module of this model the compiled form of its hot methods.

    Modules of one class share one compiled function, so each shape is compiled once.
    """
    for cls, name in _HOT_METHODS:
        compiled = torch.compile(getattr(cls, name), dynamic=False)
        for module in model.modules():
            if isinstance(module, cls):
                object.__setattr__(module, name, types.MethodType(compiled, module))
