"""How much memory the caches get."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.cache.cache_manager import CacheManager
from outrider.errors import ConfigError
from outrider.models.qwen4_exp.available_memory import available_memory
from outrider.models.qwen4_exp.cache_specs import cache_specs

if TYPE_CHECKING:
    import torch

    from outrider.cache.groups import GroupSpec
    from outrider.config import EngineConfig
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM

_USABLE_SHARE = 0.8  # of the memory at hand; the rest is for activations


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
    """

    specs: tuple[GroupSpec, ...]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    num_pending_rows: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all paged groups together."""
        return sum(s.num_bytes(self.block_size, self.dtype) for s in self.specs if s.is_paged)

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of one request's recurrent states."""
        return sum(s.num_bytes(1, self.dtype) for s in self.specs if not s.is_paged)

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
        states = self.max_num_seqs * self.state_bytes_per_request
        return (self.num_blocks + 1) * self.bytes_per_block + states

    def summary(self) -> str:
        """What a person wants to know of it, in one line."""
        return (
            f"caches: {self.num_blocks} blocks of {self.block_size} tokens at "
            f"{_readable(self.bytes_per_block)} and states of {self.max_num_seqs} requests at "
            f"{_readable(self.state_bytes_per_request)}, {_readable(self.num_bytes)} in all; a "
            f"request of {self.max_model_len} tokens takes {_readable(self.bytes_per_full_request)}"
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
    if at_hand is None:
        return plan
    available = int(at_hand * _USABLE_SHARE)
    if config.kv_cache_memory is None:
        plan = _affordable(plan, available)
    if plan.num_bytes > available:
        raise ConfigError(
            f"the caches need {plan.num_bytes} bytes, {available} are usable: lower max_num_seqs, "
            "max_model_len or kv_cache_memory"
        )
    return plan


def _affordable(plan: CachePlan, available: int) -> CachePlan:
    """The plan with as many of its blocks as so many bytes hold."""
    states = plan.max_num_seqs * plan.state_bytes_per_request
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
