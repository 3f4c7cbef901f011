"""How the caches are sized, and what is said when they cannot be."""

import pytest

from outrider.engine import cache_plan
from outrider.errors import ConfigError, RequestError
from tests.tiny_engine import greedy, make_engine, tiny_model


def test_every_request_at_full_length_finds_room() -> None:
    engine = make_engine(tiny_model(), 3, max_model_len=100, max_num_seqs=3, block_size=8)
    assert engine.cache_plan.num_blocks == 3 * 13
    assert engine.cache_manager.num_bytes() >= (
        engine.cache_plan.num_blocks * engine.cache_plan.bytes_per_block
        + 3 * engine.cache_plan.state_bytes_per_request
    )


def test_kv_cache_memory_is_in_bytes_of_all_paged_groups() -> None:
    plan = make_engine(tiny_model(), 3, max_model_len=100).cache_plan
    engine = make_engine(
        tiny_model(), 3, max_model_len=100, kv_cache_memory=5 * plan.bytes_per_block + 1
    )
    assert engine.cache_plan.num_blocks == 5
    engine.add_request("fits", [1] * 20, greedy(20))
    with pytest.raises(RequestError, match="raise kv_cache_memory or lower max_tokens"):
        engine.add_request("does not", [1] * 20, greedy(21))


def test_less_than_a_block() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory 10 is less than one block"):
        make_engine(tiny_model(), 3, kv_cache_memory=10)


def test_block_size_and_indexer() -> None:
    with pytest.raises(ConfigError, match="multiple of indexer_compress_ratio 4"):
        make_engine(tiny_model(), block_size=6)


def test_memory_that_holds_no_request_of_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_engine(tiny_model(), max_model_len=96).cache_plan
    enough = plan.state_bytes_per_request * plan.max_num_seqs + 5 * plan.bytes_per_block
    monkeypatch.setattr(cache_plan, "available_memory", lambda _: int(enough / 0.8) + 1)
    with pytest.raises(
        ConfigError, match=r"max_model_len 96 does not fit .* lower it to 40 at most"
    ):
        make_engine(tiny_model(), max_model_len=96)


def test_no_memory_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_plan, "available_memory", lambda _: 1000)
    with pytest.raises(ConfigError, match=r"the caches need .* 800 are usable"):
        make_engine(tiny_model())


def test_requests_wait_for_blocks_in_the_order_they_came() -> None:
    plan = make_engine(tiny_model(), 3).cache_plan
    engine = make_engine(tiny_model(), 3, kv_cache_memory=8 * plan.bytes_per_block)
    for name, length in (("first", 40), ("large", 40), ("small", 2)):
        engine.add_request(name, [1] * length, greedy(8))
    order = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finish_reason:
                order.append(output.request_id)
        engine.cache_manager.check_integrity()
    assert order == ["first", "large", "small"]


def test_what_a_request_leaves_behind_is_cleared() -> None:
    """A block is read under a mask before its next owner fills it, and 0 * NaN is NaN."""
    engine = make_engine(tiny_model(), 3, max_num_seqs=1)
    engine.add_request("a", [1, 5, 9], greedy(6))
    while engine.has_unfinished_requests():
        engine.step()
    for name in engine.cache_manager.block_tables:
        for tensor in engine.cache_manager.groups[name].tensors.values():
            null_block = tensor[
                :, : 8 * tensor.shape[1] // engine.cache_manager.groups[name].num_slots
            ]
            assert (tensor.sum() - null_block.sum()).abs() == 0
