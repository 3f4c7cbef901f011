"""What the caches say about one request, told by position: independent of blocks, slots and K."""

import numpy as np
from torch import Tensor

from outrider.models.qwen4_exp.cache_specs import DELTA_NET, NGRAM, TARGET_GROUPS
from tests.models.feeder import Feeder

# Inputs of rows that may still be refused: no state yet.
_PENDING = ("keys", "values", "log_decay", "beta")


def logical_state(feeder: Feeder, index: int) -> dict[str, Tensor]:
    """Every tensor of state of the target's layers, cut to the rows that are kept.

    The recurrent ones hold what has been folded; pooled index keys are left out while the request
    is within the indexer's budget, where they are not formed.
    """
    manager, config = feeder.manager, feeder.model.config
    histories = {
        DELTA_NET: config.linear_conv_kernel_dim - 1,
        NGRAM: (config.ple_conv_kernel_size - 1) * config.ngram_size,
    }
    rows, length = np.array([feeder.requests[index].row]), feeder.num_fed(index)
    state = {}
    for name in TARGET_GROUPS:
        group = manager.groups[name]
        for spec in group.spec.tensors:
            tensor = group.tensors[spec.name]
            if name in manager.state_pools:
                if name == DELTA_NET and spec.name in _PENDING:
                    continue
                tensor = tensor[:, manager.state_pools[name].slots(rows)[0]]
                if spec.name == "conv":
                    tensor = tensor[:, : histories[name]]
            else:
                if spec.tokens_per_slot > 1 and length <= group.spec.dense_limit:
                    continue
                slots = manager.block_tables[name].slots(rows, length)[0]
                ratio = spec.tokens_per_slot
                tensor = tensor[:, slots[::ratio][: length // ratio] // ratio]
            state[f"{name}.{spec.name}"] = tensor.clone()
    return state


def largest_difference(state: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Name of each tensor to its largest difference; NaN counts as infinite."""
    assert state.keys() == expected.keys()
    differences = {}
    for name, tensor in state.items():
        assert tensor.shape == expected[name].shape, name
        difference = (tensor - expected[name]).abs().nan_to_num(nan=float("inf"))
        differences[name] = float(difference.max()) if difference.numel() else 0.0
    return differences
