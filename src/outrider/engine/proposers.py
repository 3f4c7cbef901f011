"""Which proposer drafts for an engine, as its configuration says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.models.qwen4_exp.cache_specs import mtp_layer_states
from outrider.spec_decode.interface import NoProposer
from outrider.spec_decode.mtp_proposer import MTPProposer
from outrider.spec_decode.ngram_proposer import NgramProposer

if TYPE_CHECKING:
    from outrider.cache.cache_manager import CacheManager
    from outrider.config import EngineConfig
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.spec_decode.interface import Proposer
    from outrider.spec_decode.request_sampling import SamplingDefaults


def make_proposer(
    config: EngineConfig,
    model: Qwen4ExpForCausalLM,
    cache_manager: CacheManager,
    defaults: SamplingDefaults,
) -> Proposer:
    """Makes the proposer of the method that is configured; one that drafts nothing where none is.

    Raises:
        ConfigError: the method does not fit the model.
    """
    speculative = config.speculative
    if speculative is None:
        return NoProposer()
    if speculative.method == "ngram":
        shortest, longest = speculative.prompt_lookup_min, speculative.prompt_lookup_max
        assert shortest is not None, "the configuration fills it in"
        assert longest is not None, "the configuration fills it in"
        return NgramProposer(
            num_speculative_tokens=speculative.num_speculative_tokens,
            prompt_lookup_min=shortest,
            prompt_lookup_max=longest,
            max_model_len=speculative.max_model_len,
        )
    assert speculative.draft_sample_method is not None, "the configuration fills it in"
    shares_index = speculative.index_share_for_mtp_iteration
    if shares_index is None:
        shares_index = model.config.index_share_for_mtp_iteration
    return MTPProposer(
        model,
        cache_manager,
        mtp_layer_states(model.config.mtp_num_hidden_layers, cache_manager.groups),
        defaults,
        num_speculative_tokens=speculative.num_speculative_tokens,
        draft_sample_method=speculative.draft_sample_method,
        shares_index=shares_index,
        max_model_len=speculative.max_model_len,
    )
