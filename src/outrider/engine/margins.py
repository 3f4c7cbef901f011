"""How near a decoded sequence came to being another: what the self-test reports of a difference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.batch import MarginProbe, RowSpan, ScheduledBatch
from outrider.errors import RequestError
from outrider.sampling import compute_probs, gumbel_noise, process_logits
from outrider.spec_decode.request_sampling import RequestSampling

if TYPE_CHECKING:
    from outrider.cache.cache_manager import CacheManager
    from outrider.engine.model_runner import ModelRunner
    from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM
    from outrider.request import Request
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
    def measure(self, request: Request) -> Tensor:
        """The least margin at each position.

        Args:
            request: with n tokens, prompt and output, that were chosen at temperature 0 or under
                the rule `coupled`. It is not changed.

        Returns:
            [n]. At each position the smallest margin of the routers (probability), the indexers
            (score) and, from the last prompt token on, of the choice of the next token: the gap of
            the two largest logits after masks and penalties, or under `coupled` of log probability
            plus noise.

        Raises:
            RequestError: the caches have no room for it.
        """
        num_tokens = len(request.token_ids)
        manager, limit = self.cache_manager, self.max_num_rows
        if not manager.can_allocate(num_tokens):
            raise RequestError(f"no room in the caches to measure {num_tokens} tokens")
        row = manager.allocate(num_tokens)
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
        best = self.choice_scores(request, logits, start).topk(min(2, logits.shape[-1])).values
        positions = start + torch.arange(logits.shape[0], device=logits.device)
        return (best[:, 0] - best[:, -1]).masked_fill(
            positions < request.num_prompt_tokens - 1, torch.inf
        )

    def choice_scores(self, request: Request, logits: Tensor, start: int) -> Tensor:
        """What the choice of the token after each row is the argmax of, [T, V] float64.

        Args:
            request: prompt and output.
            logits: [T, V] of the rows from position `start` on.
            start: the first row's position. Rows before the prompt's last choose nothing.
        """
        defaults, num_rows = self.sampling_defaults, logits.shape[0]
        gathered = RequestSampling.from_requests([_prompt_of(request)], defaults)
        # The whole output is one window, and its tokens are the drafts before each row.
        depths = [max(start + row + 1 - request.num_prompt_tokens, 0) for row in range(num_rows)]
        drafts = torch.tensor([request.output_token_ids], dtype=torch.int64, device=logits.device)
        processors = gathered.row_processors([0] * num_rows, depths, drafts)
        if request.params.is_greedy:
            return process_logits(logits.double(), defaults.allowed_mask, processors)
        owner = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
        positions = start + 1 + torch.arange(num_rows, device=logits.device)
        noise = gumbel_noise(
            gathered.seeds[owner], gathered.choices[owner], positions, logits.shape[-1]
        )
        return compute_probs(logits, gathered.params.rows(owner), processors).log() + noise


def _prompt_of(request: Request) -> Request:
    """The request before it has emitted anything."""
    return replace(request, token_ids=request.token_ids[: request.num_prompt_tokens])
