"""How near a decoded sequence came to being another: what the self-test reports of a difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.batch import MarginProbe, RowSpan, ScheduledBatch
from outrider.errors import RequestError
from outrider.request import Request
from outrider.sampling import compute_probs, gumbel_noise
from outrider.spec_decode.request_sampling import RequestSampling
from outrider.stop_checker import StopChecker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.cache.cache_manager import CacheManager
    from outrider.engine.model_runner import ModelRunner
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.sampling_params import SamplingParams
    from outrider.spec_decode.request_sampling import SamplingDefaults


@dataclass(frozen=True)
class MarginMeter:
    """Runs a sequence plainly and measures every discrete choice on the way.

    Attributes:
        model: of the runner.
        model_runner: the target.
        cache_manager: with room for one more request.
        sampling_defaults: which ids may be chosen.
        max_num_rows: of one pass; a longer sequence runs in pieces.
    """

    model: Qwen4ExpForCausalLM
    model_runner: ModelRunner
    cache_manager: CacheManager
    sampling_defaults: SamplingDefaults
    max_num_rows: int

    @torch.inference_mode()
    def measure(
        self, token_ids: Sequence[int], num_prompt_tokens: int, params: SamplingParams
    ) -> Tensor:
        """The least margin at each position.

        Args:
            token_ids: n of them, prompt and output.
            num_prompt_tokens: how many are the prompt.
            params: how the output was chosen: at temperature 0, or under the rule `coupled`.

        Returns:
            [n]. At each position the smallest margin of the routers (probability), the indexers
            (score) and, from the last prompt token on, of the choice of the next token: the gap of
            the two largest logits, or under `coupled` of log probability plus noise.

        Raises:
            RequestError: the caches have no room for it.
        """
        request = Request(
            request_id="margins",
            token_ids=list(token_ids),
            num_prompt_tokens=num_prompt_tokens,
            params=params,
            max_output_tokens=1,
            stop_checker=StopChecker(params, frozenset(), 1, None),
            seed=params.seed or 0,
        )
        manager, limit = self.cache_manager, self.max_num_rows
        if not manager.can_allocate(len(token_ids)):
            raise RequestError(f"no room in the caches to measure {len(token_ids)} tokens")
        row = manager.allocate(len(token_ids))
        try:
            pieces = self._measure_pieces(request, row, limit)
        finally:
            manager.free(row)
        return torch.cat(pieces)

    def _measure_pieces(self, request: Request, row: int, limit: int) -> list[Tensor]:
        """The margins of the request's tokens, `limit` at a time."""
        num_tokens = len(request.token_ids)
        pieces = []
        for start in range(0, num_tokens, limit):
            span = RowSpan(row, start, min(limit, num_tokens - start), 0)
            probe = MarginProbe()
            batch = ScheduledBatch([request], [span], [True], None)
            target = self.model_runner.verify(batch, probe)
            choice = self._choice_margins(request, self.model.logits(target.hidden_states), start)
            margins = [choice, *probe.router, *probe.indexer]
            pieces.append(torch.stack([margin.to(choice.dtype) for margin in margins]).amin(0))
            self.cache_manager.commit([span], [0])
        return pieces

    def _choice_margins(self, request: Request, logits: Tensor, start: int) -> Tensor:
        """Gap of the two best candidates for the token after each row, [T, V] to [T] float64."""
        device = logits.device
        mask = self.sampling_defaults.allowed_mask()
        scores = logits.double()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        positions = start + torch.arange(logits.shape[0], device=device)
        if not request.params.is_greedy:
            gathered = RequestSampling.from_requests([request], mask, device)
            owner = torch.zeros_like(positions)
            noise = gumbel_noise(
                gathered.seeds[owner], gathered.choices[owner], positions + 1, logits.shape[-1]
            )
            scores = compute_probs(logits, gathered.params.rows(owner)).log() + noise
        best = scores.topk(min(2, scores.shape[-1]), dim=-1).values
        return (best[:, 0] - best[:, -1]).masked_fill(
            positions < request.num_prompt_tokens - 1, torch.inf
        )
