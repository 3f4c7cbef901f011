"""Cache groups: a state that does not say how it rolls back cannot be built."""

from typing import Any

import pytest
import torch

from outrider.cache.groups import CacheGroup, GroupSpec, Rollback, TensorSpec
from outrider.models.qwen4_exp.cache_specs import cache_specs
from tests.models.tiny_checkpoint import tiny_config

CPU = torch.device("cpu")
KEYS = TensorSpec("keys", (2, 3), Rollback.TRUNCATE)
POOLED = TensorSpec("pooled", (5,), Rollback.REGATHER, tokens_per_slot=4)


@pytest.mark.parametrize("rollback", [None, "", "truncate", "snapshot", True, 0])
def test_a_state_without_a_rollback_is_refused(rollback: Any) -> None:
    with pytest.raises(TypeError, match="state 'keys' declares no rollback"):
        TensorSpec("keys", (2, 3), rollback)


def test_a_state_must_name_its_rollback() -> None:
    with pytest.raises(TypeError, match="rollback"):
        TensorSpec("keys", (2, 3))  # type: ignore[call-arg]


@pytest.mark.parametrize("num_mtp_layers", [0, 1])
def test_every_state_of_the_model_declares_one(num_mtp_layers: int) -> None:
    specs = cache_specs(tiny_config(), num_mtp_layers, num_pending_rows=3)
    ways = {
        f"{spec.name}.{tensor.name}": tensor.rollback for spec in specs for tensor in spec.tensors
    }
    truncate, replay, regather = Rollback.TRUNCATE, Rollback.REPLAY, Rollback.REGATHER
    expected = {
        "target_attention.keys": truncate,
        "target_attention.values": truncate,
        "target_index.raw_index_keys": truncate,
        "target_index.pooled_index_keys": regather,
        "delta_net.recurrent": replay,
        "delta_net.conv": replay,
        "delta_net.keys": replay,
        "delta_net.values": replay,
        "delta_net.log_decay": replay,
        "delta_net.beta": replay,
        "ngram.conv": replay,
    }
    if num_mtp_layers:
        head = [name for name in expected if name.startswith("target")]
        expected |= {name.replace("target", "mtp"): expected[name] for name in head}
    assert ways == expected
    assert len({spec.name for spec in specs}) == len(specs)


def test_groups_of_layers_that_are_not_there_are_left_out() -> None:
    config = tiny_config(layer_types=["linear_attention"] * 4, ple_layer_ids=[])
    assert [spec.name for spec in cache_specs(config, 0, 2)] == ["delta_net"]
    config = tiny_config(layer_types=["full_attention"] * 4, ple_layer_ids=[])
    assert [spec.name for spec in cache_specs(config, 0, 2)] == ["target_attention", "target_index"]


def test_tensors_of_a_group() -> None:
    spec = GroupSpec("index", True, 3, (KEYS, POOLED), ratio=4)
    group = CacheGroup(spec, 24, torch.float64, CPU)
    assert {name: tuple(t.shape) for name, t in group.tensors.items()} == {
        "keys": (3, 24, 2, 3),
        "pooled": (3, 6, 5),
    }
    # Memory that was never written may be read under a mask.
    assert all((tensor == 0).all() for tensor in group.tensors.values())
    assert all(tensor.dtype == torch.float64 for tensor in group.tensors.values())
    layer = group.layer(1)
    layer["keys"][5] = 7.0
    assert (group.tensors["keys"][1, 5] == 7).all()
    assert group.tensors["keys"].count_nonzero() == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bytes(dtype: torch.dtype) -> None:
    spec = GroupSpec("index", True, 3, (KEYS, POOLED), ratio=4)
    group = CacheGroup(spec, 24, dtype, CPU)
    assert group.num_bytes == sum(t.numel() for t in group.tensors.values()) * dtype.itemsize
    assert spec.num_bytes(24, dtype) == group.num_bytes
    # What four slots share is counted once.
    assert spec.num_bytes(4, dtype) * 6 == group.num_bytes


def test_clearing_slots() -> None:
    spec = GroupSpec("index", True, 2, (KEYS, POOLED), ratio=4)
    group = CacheGroup(spec, 24, torch.float32, CPU)
    for tensor in group.tensors.values():
        tensor.fill_(torch.nan)
    group.clear(torch.cat([torch.arange(8, 16), torch.arange(20, 24)]))
    cleared = (group.tensors["keys"] == 0).flatten(2).all(-1)
    assert cleared.all(0).nonzero().flatten().tolist() == [*range(8, 16), *range(20, 24)]
    assert torch.equal(cleared[0], cleared[1])
    pooled = (group.tensors["pooled"] == 0).all(-1)
    assert pooled[0].nonzero().flatten().tolist() == [2, 3, 5]
