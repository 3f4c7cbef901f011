"""How much memory the caches get."""

from __future__ import annotations

from dataclasses import dataclass
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
        per_token = sum(s.bytes_per_slot(self.dtype) for s in self.specs if s.is_paged)
        return per_token * self.block_size

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of one request's recurrent states."""
        return sum(s.bytes_per_slot(self.dtype) for s in self.specs if not s.is_paged)

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
    specs = cache_specs(model.config, num_mtp_layers, config.num_speculative_tokens)
    blocks_per_request = -(-max_model_len // config.block_size)
    plan = CachePlan(
        specs=tuple(specs),
        block_size=config.block_size,
        num_blocks=blocks_per_request * config.max_num_seqs,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        num_pending_rows=config.num_speculative_tokens,
        dtype=weight.dtype,
        device=weight.device,
    )
    if config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // max(plan.bytes_per_block, 1)
        plan = _with_blocks(plan, min(num_blocks, plan.num_blocks))
        if not plan.num_blocks:
            raise ConfigError(
                f"kv_cache_memory {config.kv_cache_memory} is less than one block, "
                f"{plan.bytes_per_block} bytes"
            )
    at_hand = available_memory(plan.device)
    if at_hand is None:
        return plan
    available = int(at_hand * _USABLE_SHARE)
    states = plan.state_bytes_per_request * plan.max_num_seqs
    if config.kv_cache_memory is None:
        affordable = max(available - states, 0) // max(plan.bytes_per_block, 1)
        plan = _with_blocks(plan, min(plan.num_blocks, affordable))
        if 0 < plan.num_blocks < blocks_per_request:
            raise ConfigError(
                f"max_model_len {max_model_len} does not fit into the memory at hand: lower it to "
                f"{plan.num_blocks * plan.block_size} at most, or max_num_seqs"
            )
    needed = states + plan.bytes_per_block * plan.num_blocks
    if needed > available or not plan.num_blocks:
        raise ConfigError(
            f"the caches need {needed} bytes, {available} are usable: lower max_num_seqs, "
            "max_model_len or kv_cache_memory"
        )
    return plan


def _with_blocks(plan: CachePlan, num_blocks: int) -> CachePlan:
    return CachePlan(**{**plan.__dict__, "num_blocks": num_blocks})
