"""How much memory the caches get."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.cache.cache_manager import CacheManager
from outrider.errors import ConfigError
from outrider.models.qwen4_exp.available_memory import available_memory
from outrider.models.qwen4_exp.cache_specs import cache_specs, snapshot_specs

if TYPE_CHECKING:
    import torch

    from outrider.cache.groups import GroupSpec
    from outrider.config import EngineConfig
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

logger = logging.getLogger(__name__)

_USABLE_SHARE = 0.8  # of the memory at hand; the rest is for activations
_SNAPSHOT_SHARE = 0.1  # of the memory at hand, for states of requests that have ended
_SNAPSHOTS_PER_REQUEST = 8  # where the paged caches are so small that as much is less than these


@dataclass(frozen=True)
class CachePlan:
    """Sizes of the caches, decided before anything is allocated.

    Attributes:
        specs: the cache groups.
        block_size: positions a block.
        num_blocks: of each paged group.
        max_num_seqs: requests at once.
        max_model_len: positions a request may need.
        num_pending_rows: draft rows the recurrent states keep.
        dtype: of the caches.
        device: of the caches.
        snapshot_specs: what is kept of a request at a block boundary.
        num_snapshots: how many of these.
    """

    specs: tuple[GroupSpec, ...]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    num_pending_rows: int
    dtype: torch.dtype
    device: torch.device
    snapshot_specs: tuple[GroupSpec, ...] = ()
    num_snapshots: int = 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all paged groups together."""
        return sum(s.num_bytes(self.block_size, self.dtype) for s in self.specs if s.is_paged)

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of one request's recurrent states."""
        return sum(s.num_bytes(1, self.dtype) for s in self.specs if not s.is_paged)

    @property
    def bytes_per_snapshot(self) -> int:
        """Bytes of the states that are kept at one block boundary."""
        return sum(s.num_bytes(1, self.dtype) for s in self.snapshot_specs)

    @property
    def bytes_per_full_request(self) -> int:
        """Bytes of a request of max_model_len: its blocks and its states."""
        return self.num_blocks_per_request * self.bytes_per_block + self.state_bytes_per_request

    @property
    def num_blocks_per_request(self) -> int:
        """Blocks of a request of max_model_len."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of everything, the null block that belongs to nobody included."""
        return (self.num_blocks + 1) * self.bytes_per_block + self.num_state_bytes

    @property
    def num_state_bytes(self) -> int:
        """Bytes of the recurrent states: of requests that run, and at block boundaries."""
        running = self.max_num_seqs * self.state_bytes_per_request
        return running + self.num_snapshots * self.bytes_per_snapshot

    def summary(self) -> str:
        """What a person wants to know of it, in one line."""
        return (
            f"caches: {self.num_blocks} blocks of {self.block_size} tokens at "
            f"{_readable(self.bytes_per_block)} and states of {self.max_num_seqs} requests at "
            f"{_readable(self.state_bytes_per_request)}, {self._shared()}"
            f"{_readable(self.num_bytes)} in all; a request of {self.max_model_len} tokens takes "
            f"{_readable(self.bytes_per_full_request)}"
        )

    def _shared(self) -> str:
        if not self.num_snapshots:
            return ""
        return (
            f"{self.num_snapshots} states of shared prefixes at "
            f"{_readable(self.bytes_per_snapshot)}, "
        )

    def build(self) -> CacheManager:
        """Allocates the caches."""
        return CacheManager(
            self.specs,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            num_pending_rows=self.num_pending_rows,
            dtype=self.dtype,
            device=self.device,
            snapshot_specs=self.snapshot_specs,
            num_snapshots=self.num_snapshots,
        )


def plan_cache(config: EngineConfig, model: Qwen4ExpForCausalLM, max_model_len: int) -> CachePlan:
    """Sizes the caches by the options, or by what all requests at full length need.

    Raises:
        ConfigError: the block size does not fit the indexer, or the memory is not there.
    """
    ratio = model.config.indexer_compress_ratio
    if ratio and config.block_size % ratio:
        raise ConfigError(
            f"block_size {config.block_size} must be a multiple of indexer_compress_ratio {ratio}"
        )
    weight = model.lm_head.weight
    num_mtp_layers = model.config.mtp_num_hidden_layers if config.uses_mtp else 0
    plan = CachePlan(
        specs=tuple(cache_specs(model.config, num_mtp_layers, config.num_speculative_tokens)),
        snapshot_specs=tuple(snapshot_specs(model.config, num_mtp_layers)),
        block_size=config.block_size,
        num_blocks=0,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        num_pending_rows=config.num_speculative_tokens,
        dtype=weight.dtype,
        device=weight.device,
    )
    # More than all requests at full length can need is of no use.
    plan = replace(plan, num_blocks=plan.num_blocks_per_request * plan.max_num_seqs)
    if config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // max(plan.bytes_per_block, 1)
        if not num_blocks:
            raise ConfigError(
                f"kv_cache_memory {config.kv_cache_memory} is less than one block of "
                f"{plan.block_size} tokens, {plan.bytes_per_block} bytes"
            )
        plan = replace(plan, num_blocks=min(num_blocks, plan.num_blocks))
    at_hand = available_memory(plan.device)
    if config.enable_prefix_caching:
        plan = _with_snapshots(plan, config.prefix_cache_memory, at_hand)
    if at_hand is None:
        return plan
    available = int(at_hand * _USABLE_SHARE)
    if config.kv_cache_memory is None:
        plan = _affordable(plan, available)
    if plan.num_bytes > available:
        raise ConfigError(
            f"the caches need {plan.num_bytes} bytes, {available} are usable: lower max_num_seqs, "
            "max_model_len, kv_cache_memory or prefix_cache_memory"
        )
    return plan


def _with_snapshots(plan: CachePlan, num_bytes: int | None, at_hand: int | None) -> CachePlan:
    """The plan with states for shared prefixes, one for each block at most.

    Args:
        plan: with its blocks.
        num_bytes: for the states, None where nobody has said.
        at_hand: bytes of memory, None where that is not known.
    """
    size = max(plan.bytes_per_snapshot, 1)
    limit = num_bytes
    if limit is None:
        least = _SNAPSHOTS_PER_REQUEST * plan.max_num_seqs * size
        limit = max(plan.num_blocks * plan.bytes_per_block, least)
        if at_hand is not None:
            limit = min(limit, int(at_hand * _SNAPSHOT_SHARE))
    num_snapshots = min(limit // size, plan.num_blocks)
    if num_snapshots:
        return replace(plan, num_snapshots=num_snapshots)
    if num_bytes is not None:
        raise ConfigError(
            f"prefix_cache_memory {num_bytes} is less than the states at one block boundary, "
            f"{size} bytes: raise it, or set enable_prefix_caching to false"
        )
    logger.warning(
        "no prefix is shared: the states at one block boundary take %s, and %s are at hand for "
        "them; prefix_cache_memory sets how much they get",
        _readable(size),
        _readable(limit),
    )
    return plan


def _affordable(plan: CachePlan, available: int) -> CachePlan:
    """The plan with as many of its blocks as so many bytes hold."""
    states = plan.num_state_bytes
    num_blocks = max(available - states, 0) // max(plan.bytes_per_block, 1) - 1
    if num_blocks < 1 and states <= available and plan.block_size > plan.max_model_len:
        raise ConfigError(
            f"block_size {plan.block_size} makes blocks of {plan.bytes_per_block} bytes, and "
            f"{available} are usable: lower it, a request has {plan.max_model_len} tokens at most"
        )
    if 0 < num_blocks < plan.num_blocks_per_request:
        raise ConfigError(
            f"max_model_len {plan.max_model_len} does not fit into the memory at hand: lower it to "
            f"{num_blocks * plan.block_size} at most, or max_num_seqs"
        )
    # Without room for a single block the caller tells what all of them need.
    return plan if num_blocks < 1 else replace(plan, num_blocks=min(num_blocks, plan.num_blocks))


def _readable(num_bytes: int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
