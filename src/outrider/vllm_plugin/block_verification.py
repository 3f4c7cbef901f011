"""Block verification on vLLM's V1 runner: third word of the step, by the rules of this package.

The V1 runner takes the option `rejection_sample_method: block` and verifies token by token all the
same; its proposers then draw no drafts at all. With this hook both follow the option. Target law,
bonus token and the seeded generators stay vLLM's.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, Any

import torch

from outrider.sampling import sample_from_probs
from outrider.spec_decode import block_verify, greedy_verify
from outrider.vllm_plugin.patching import own_part_of_platform, replace
from outrider.vllm_plugin.verify_rows import VerifyRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

# A draw of exactly 0 lies under a threshold of 0.
_LEAST_UNIFORM = 2.0**-54

_rule: ContextVar[str] = ContextVar("rejection_sample_method", default="standard")
"""Rule of the sampler that runs: vLLM's function below it is not told."""


def obstacle() -> str | None:
    """Platforms that are plugins themselves, such as Ascend, bring their own rejection sampler."""
    return own_part_of_platform("rejection sampler")


def install() -> None:
    """Replaces the function that decides, and lets the proposers draw drafts under `block`."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import llm_base_proposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(rejection_sampler.RejectionSampler, "__init__", _remember_rule)
    replace(rejection_sampler.RejectionSampler, "forward", _with_rule)
    replace(rejection_sampler, "rejection_sample", _by_rule)
    replace(llm_base_proposer.SpecDecodeBaseProposer, "__init__", _drawing_under_block)
    replace(llm_base_proposer.SpecDecodeBaseProposer, "_sample_from_logits", _seeds_of_rows)
    replace(llm_base_proposer, "compute_probs_and_sample_next_token", _seeded_drafts)
    replace(GPUModelRunner, "_get_spec_decode_draft_probs", _laws_of_drafts)


def _remember_rule(init: Callable[..., None]) -> Callable[..., None]:
    def remember_rule(self: Any, sampler: Any, spec_config: Any = None, device: Any = None) -> None:
        init(self, sampler, spec_config, device)
        method = "standard" if spec_config is None else spec_config.rejection_sample_method
        self.rejection_sample_method = method

    return remember_rule


def _with_rule(forward: Callable[..., Any]) -> Callable[..., Any]:
    def with_rule(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _rule.set(self.rejection_sample_method)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _rule.reset(token)

    return with_rule


def _drawing_under_block(init: Callable[..., None]) -> Callable[..., None]:
    def drawing_under_block(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        config = self.speculative_config
        self._enable_probabilistic_draft_probs |= (
            config.rejection_sample_method == "block"
            and config.draft_sample_method == "probabilistic"
        )

    return drawing_under_block


def _by_rule(rejection_sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def by_rule(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        **options: Any,
    ) -> Tensor:
        if _rule.get() != "block" or draft_probs is None or sampling_metadata.all_greedy:
            # With drafts that were not drawn the rules are the same.
            return rejection_sample(
                draft_token_ids,
                num_draft_tokens,
                max_spec_len,
                cu_num_draft_tokens,
                draft_probs,
                target_logits,
                bonus_token_ids,
                sampling_metadata,
                **options,
            )
        rows = VerifyRows.gather(
            draft_token_ids, num_draft_tokens, draft_probs, target_logits, bonus_token_ids
        )
        return verify_block(rows, sampling_metadata).to(torch.int32)

    return by_rule


def verify_block(rows: VerifyRows, sampling_metadata: Any) -> Tensor:
    """[B, K + 1] int64: the tokens that each request emits, then placeholders.

    Args:
        rows: of B requests with K drafts at most.
        sampling_metadata: vLLM's, of which temperatures and generators are read.
    """
    width = rows.draft_token_ids.shape[1]
    accept, resample = (
        _uniforms(rows.num_drafts, num_drawn, sampling_metadata.generators, rows.device)
        for num_drawn in (width, 1)
    )
    result = block_verify(
        rows.draft_token_ids,
        rows.draft_probs,
        rows.target_probs,
        accept,
        # A window stops at one place, and its one number is read there.
        resample.expand(-1, width + 1),
    )
    token_ids = result.output_token_ids
    # Where the target's law holds no numbers there is no right token, and vLLM's own sampler takes
    # some id of the vocabulary as well, without a word.
    if result.is_broken.any():
        _warn_of_broken_rows()
    stuck = rows.target_argmax[:, :1].expand_as(token_ids)
    first = torch.arange(token_ids.shape[1], device=rows.device) == 0
    token_ids = token_ids.where(~(result.is_broken[:, None] & first), stuck)
    if not sampling_metadata.all_random:
        greedy = greedy_verify(rows.draft_token_ids, rows.target_argmax).output_token_ids
        is_greedy = sampling_metadata.temperature == 0
        token_ids = greedy.where(is_greedy[:, None], token_ids)
    return token_ids


def _warn_of_broken_rows() -> None:
    from vllm.logger import init_logger

    init_logger("vllm.outrider").warning_once(
        "outrider: the model's probabilities are not finite; a row without any gets some token"
    )


def _uniforms(
    num_drafts: list[int],
    width: int,
    generators: Mapping[int, torch.Generator],
    device: torch.device,
) -> Tensor:
    """[B, width] float64 in (0, 1), from a request's generator where it has one.

    A request without drafts uses none, and its generator stays where it is.
    """
    drawn = torch.rand((len(num_drafts), width), dtype=torch.float64, device=device)
    for index, generator in generators.items():
        num_drawn = min(width, num_drafts[index])
        if num_drawn:
            drawn[index, :num_drawn].uniform_(generator=generator)
    return drawn.clamp_(min=_LEAST_UNIFORM)


def _seeds_of_rows(
    sample: Callable[..., tuple[Tensor, Tensor | None]],
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def seeds_of_rows(
        self: Any, logits: Tensor, sampling_metadata: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Parallel drafting has the K rows of a request one after another, [B * K, V]."""
        temperature, generators = sampling_metadata.temperature, sampling_metadata.generators
        if temperature is not None and generators and len(temperature) != len(logits):
            num_rows = len(logits) // len(temperature)
            sampling_metadata = with_fields(
                sampling_metadata,
                generators={
                    request * num_rows + row: generator
                    for request, generator in generators.items()
                    for row in range(num_rows)
                },
            )
        return sample(self, logits, sampling_metadata)

    return seeds_of_rows


def _seeded_drafts(
    sample: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    def seeded_drafts(
        logits: Tensor, sampling_metadata: Any, use_fp64_gumbel: bool = False
    ) -> tuple[Tensor, Tensor]:
        if sampling_metadata.all_greedy:
            return sample(logits, sampling_metadata, use_fp64_gumbel)
        is_greedy = sampling_metadata.temperature == 0
        temperature = sampling_metadata.temperature.where(~is_greedy, 1)
        probs = (logits / temperature[:, None]).softmax(-1, dtype=torch.float32)
        generators = sampling_metadata.generators
        drawn = _uniforms([1] * len(probs), 1, generators, probs.device).squeeze(1)
        token_ids = sample_from_probs(probs, drawn)
        return probs.argmax(-1).where(is_greedy, token_ids), probs

    return seeded_drafts


def _laws_of_drafts(get_probs: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    def laws_of_drafts(self: Any, spec_decode_metadata: Any) -> Tensor | None:
        """[T, V] laws of the drafts, zeros where one is lost.

        A request that sat out a step has drafts of an earlier one, whose laws are gone. vLLM then
        takes every draft of the batch for certain. As drafts without a law they are not drawn, and
        their places are the target's.
        """
        drafter = getattr(self, "drafter", None)
        is_drawn = getattr(drafter, "_enable_probabilistic_draft_probs", False)
        if not is_drawn or self.input_batch.sampling_metadata.all_greedy:
            return get_probs(self, spec_decode_metadata)
        laws = self._draft_probs
        places = {name: row for row, name in enumerate(self._draft_prob_req_ids or ())}
        rows = [
            torch.zeros(num_drafts, self.input_batch.vocab_size, device=self.device)
            if laws is None or name not in places
            else laws[places[name], :num_drafts]
            for name, num_drafts in zip(
                self.input_batch.req_ids, spec_decode_metadata.num_draft_tokens, strict=True
            )
        ]
        return torch.cat(rows).contiguous()

    return laws_of_drafts
