"""How the caches are sized, and what is said when they cannot be."""

import re

import pytest

from outrider.engine import cache_plan
from outrider.errors import ConfigError, RequestError
from tests.tiny_engine import Job, decode, decode_alone, greedy, make_engine, tiny_model


def test_every_request_at_full_length_finds_room() -> None:
    engine = make_engine(tiny_model(), 3, max_model_len=100, max_num_seqs=3, block_size=8)
    assert engine.cache_plan.num_blocks == 3 * 13
    # The null block comes on top.
    plan = engine.cache_plan
    blocks, states = 40 * plan.bytes_per_block, 3 * plan.state_bytes_per_request
    kept = 24 * plan.bytes_per_snapshot
    assert plan.num_bytes == engine.cache_manager.num_bytes() == blocks + states + kept
    assert plan.bytes_per_full_request == blocks // 40 * 13 + states // 3


@pytest.mark.parametrize("options", [{}, {"kv_cache_memory": 30_000}, {"max_num_seqs": 1}])
@pytest.mark.parametrize("k", [0, 3])
def test_the_plan_is_told_in_one_line(
    k: int, options: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "outrider")
    plan = make_engine(tiny_model(), k, max_model_len=100, **options).cache_plan
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == plan.summary()
    assert len(message) < 240
    for number in (
        plan.num_snapshots,
        plan.num_blocks,
        plan.block_size,
        plan.max_num_seqs,
        plan.max_model_len,
    ):
        assert re.search(rf"\b{number}\b", message)
    assert f", {cache_plan._readable(plan.num_bytes)} in all;" in message
    for amount in (
        plan.bytes_per_block,
        plan.state_bytes_per_request,
        plan.bytes_per_snapshot,
        plan.bytes_per_full_request,
    ):
        assert f"{amount / 1024:.1f} KiB" in message


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 51, "2048.0 TiB"),
    ],
)
def test_bytes_that_can_be_read(amount: int, text: str) -> None:
    assert cache_plan._readable(amount) == text


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
    with pytest.raises(ConfigError, match="kv_cache_memory 10 is less than one block of 8 tokens"):
        make_engine(tiny_model(), 3, kv_cache_memory=10)


@pytest.mark.parametrize("block_size", [1 << 40, 10**15])
def test_blocks_that_are_too_large(block_size: int) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"block_size {block_size} makes blocks of \d+ bytes, and \d+ are usable: lower it",
    ):
        make_engine(tiny_model(), 3, block_size=block_size)


def test_a_block_may_be_longer_than_any_request() -> None:
    engine = make_engine(tiny_model(), 3, block_size=64, max_model_len=20, max_num_seqs=2)
    assert engine.cache_plan.num_blocks == 2
    results = decode(engine, [Job([1, 5, 9], greedy(17))])
    assert results[0].token_ids == decode_alone(tiny_model(), Job([1, 5, 9], greedy(17))).token_ids


def test_block_size_and_indexer() -> None:
    with pytest.raises(ConfigError, match="multiple of indexer_compress_ratio 4"):
        make_engine(tiny_model(), block_size=6)


def test_memory_that_holds_no_request_of_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_engine(tiny_model(), max_model_len=96).cache_plan
    # Five blocks, and the one that belongs to nobody.
    enough = plan.state_bytes_per_request * plan.max_num_seqs + 6 * plan.bytes_per_block
    monkeypatch.setattr(cache_plan, "available_memory", lambda _: int(enough / 0.8) + 1)
    with pytest.raises(
        ConfigError, match=r"max_model_len 96 does not fit .* lower it to 40 at most"
    ):
        make_engine(tiny_model(), max_model_len=96, enable_prefix_caching=False)


def test_states_of_shared_prefixes() -> None:
    """As many as lie in the memory of the blocks, and some at least; or what was asked for."""
    plan = make_engine(tiny_model(), 3).cache_plan
    assert plan.num_snapshots == 8 * plan.max_num_seqs
    longer = make_engine(tiny_model(), 3, max_model_len=256, max_num_seqs=1, block_size=4)
    kept = longer.cache_plan.num_snapshots * plan.bytes_per_snapshot
    assert 8 < longer.cache_plan.num_snapshots < longer.cache_plan.num_blocks
    paged = longer.cache_plan.num_blocks * longer.cache_plan.bytes_per_block
    assert 0 <= paged - kept < plan.bytes_per_snapshot
    assert plan.bytes_per_snapshot < plan.state_bytes_per_request, "there are no pending rows"
    engine = make_engine(tiny_model(), 3, prefix_cache_memory=3 * plan.bytes_per_snapshot + 1)
    assert engine.cache_plan.num_snapshots == 3
    assert engine.cache_plan.num_blocks == plan.num_blocks
    assert engine.cache_manager.num_bytes() == engine.cache_plan.num_bytes
    huge = make_engine(tiny_model(), 3, prefix_cache_memory=1 << 40)
    assert huge.cache_plan.num_snapshots == plan.num_blocks
    off = make_engine(tiny_model(), 3, enable_prefix_caching=False)
    assert (off.cache_plan.num_snapshots, off.cache_manager.prefix) == (0, None)
    assert "shared" not in off.cache_plan.summary()
    with pytest.raises(
        ConfigError, match=r"prefix_cache_memory 10 is less than the states .* raise it, or set"
    ):
        make_engine(tiny_model(), 3, prefix_cache_memory=10)


def test_no_room_for_states_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that can share nothing is no silent one."""
    plan = make_engine(tiny_model(), 3, max_num_seqs=1).cache_plan
    at_hand = 9 * plan.bytes_per_snapshot
    monkeypatch.setattr(cache_plan, "available_memory", lambda _: at_hand)
    caplog.clear()
    options = {"max_num_seqs": 1, "max_model_len": 16, "block_size": 4}
    engine = make_engine(tiny_model(), 3, **options)
    assert engine.cache_manager.prefix is None
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "no prefix is shared" in warning.getMessage()
    assert "prefix_cache_memory" in warning.getMessage()


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
    engine.reset_prefix_cache()
    for name in engine.cache_manager.block_tables:
        for tensor in engine.cache_manager.groups[name].tensors.values():
            null_block = tensor[
                :, : 8 * tensor.shape[1] // engine.cache_manager.groups[name].num_slots
            ]
            assert (tensor.sum() - null_block.sum()).abs() == 0
