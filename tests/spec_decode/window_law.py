"""The exact law of what one window emits, by enumeration of every draft, coin and draw.

Two ways to it. `emitted_law` integrates the probabilities that the pieces of a rule give, so that
a mutated piece shows. `law_through_rule` calls the rule itself with one uniform from every cell in
which its answer is constant, weighted by the size of the cell, so that the wiring shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.batch import PLACEHOLDER_TOKEN_ID
from outrider.spec_decode.verify_rules import (
    VerifyResult,
    block_acceptance_thresholds,
    block_prefix_ratios,
    residual_weights,
    standard_acceptance_probs,
)
from outrider.spec_decode.verify_window import VerifyWindow

Verify = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], VerifyResult]


@dataclass(frozen=True)
class Tables:
    """A draft and a target model over V tokens: one law for each context within the window.

    Attributes:
        draft: K tensors, the i-th [V**i, V]; a context is read as a number to base V.
        target: K + 1 tensors, likewise.
    """

    draft: list[Tensor]
    target: list[Tensor]

    @classmethod
    def random(cls, vocab_size: int, num_drafts: int, seed: int, *, is_sparse: bool) -> "Tables":
        """Random conditional laws; sparse ones have about a third of the entries at 0."""
        generator = torch.Generator().manual_seed(seed)

        def laws(depth: int) -> Tensor:
            shape = (vocab_size**depth, vocab_size)
            logits = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5
            if is_sparse:
                is_hidden = torch.rand(shape, generator=generator) < 0.35
                is_hidden.scatter_(-1, logits.argmax(-1, keepdim=True), value=False)
                logits = logits.masked_fill(is_hidden, -torch.inf)
            return logits.softmax(-1)

        return cls(
            draft=[laws(depth) for depth in range(num_drafts)],
            target=[laws(depth) for depth in range(num_drafts + 1)],
        )

    @property
    def vocab_size(self) -> int:
        return self.target[0].shape[1]

    @property
    def num_drafts(self) -> int:
        return len(self.draft)

    def joint(self) -> Tensor:
        """[V**(K + 1)]: the target's law of K + 1 tokens."""
        law = torch.ones(1, dtype=torch.float64)
        for table in self.target:
            law = (law.unsqueeze(-1) * table).flatten()
        return law


@dataclass(frozen=True)
class Draws:
    """Every sequence of K drafts, one a row.

    Attributes:
        token_ids: [B, K], B = V**K.
        draft_probs: [B, K, V].
        target_probs: [B, K + 1, V].
        weight: [B], probability that the draft model draws the row.
    """

    token_ids: Tensor
    draft_probs: Tensor
    target_probs: Tensor
    weight: Tensor

    @classmethod
    def of(cls, tables: Tables) -> "Draws":
        vocab_size, num_drafts = tables.vocab_size, tables.num_drafts
        grid = [torch.arange(vocab_size)] * num_drafts
        token_ids = torch.cartesian_prod(*grid).view(-1, num_drafts)
        contexts = [context_index(token_ids[:, :i], vocab_size) for i in range(num_drafts + 1)]
        draft_probs = torch.stack([t[c] for t, c in zip(tables.draft, contexts, strict=False)], 1)
        target_probs = torch.stack([t[c] for t, c in zip(tables.target, contexts, strict=True)], 1)
        drawn_with = draft_probs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        return cls(token_ids, draft_probs, target_probs, drawn_with.prod(-1))

    def window(self) -> VerifyWindow:
        return VerifyWindow.open(self.token_ids, self.draft_probs, self.target_probs)

    def rows(self, index: Tensor) -> "Draws":
        return Draws(
            self.token_ids[index],
            self.draft_probs[index],
            self.target_probs[index],
            self.weight[index],
        )

    def with_placeholders(self, num_drawn: Tensor) -> "Draws":
        """Nothing was drawn past `num_drawn` [B]."""
        is_past = torch.arange(self.token_ids.shape[1]) >= num_drawn.unsqueeze(-1)
        return replace(self, token_ids=self.token_ids.masked_fill(is_past, PLACEHOLDER_TOKEN_ID))


@dataclass(frozen=True)
class RuleLaw:
    """What a rule does with each draft sequence.

    Attributes:
        coin: [B, K], probability that the uniform of a place lies under its threshold.
        stop: [B, K + 1], probability of keeping exactly so many drafts.
        final: [B, K + 1, V], law of the token that follows them.
    """

    coin: Tensor
    stop: Tensor
    final: Tensor


def standard_law(window: VerifyWindow) -> RuleLaw:
    coin = standard_acceptance_probs(window)
    return RuleLaw(coin, first_failure_law(coin), final_law(window, None))


def block_law(window: VerifyWindow) -> RuleLaw:
    prefix_ratios = block_prefix_ratios(window)
    coin = block_acceptance_thresholds(window, prefix_ratios)
    return RuleLaw(coin, last_success_law(coin), final_law(window, prefix_ratios))


def first_failure_law(coin: Tensor) -> Tensor:
    """[B, K] to [B, K + 1]: number of successes before the first failure."""
    ones = torch.ones_like(coin[:, :1])
    return torch.cat([ones, coin.cumprod(-1)], -1) * torch.cat([1 - coin, ones], -1)


def last_success_law(coin: Tensor) -> Tensor:
    """[B, K] to [B, K + 1]: place of the last success, counted from 1, or 0."""
    ones = torch.ones_like(coin[:, :1])
    all_fail_after = torch.cat([(1 - coin).flip(-1).cumprod(-1).flip(-1), ones], -1)
    return torch.cat([ones, coin], -1) * all_fail_after


def final_law(window: VerifyWindow, prefix_ratios: Tensor | None) -> Tensor:
    """[B, K + 1, V]: the residual where a valid draft follows, the target where none does."""
    assert window.draft_probs is not None
    num_drafts = window.draft_probs.shape[1]
    scale = None if prefix_ratios is None else prefix_ratios[:, :num_drafts]
    residual = residual_weights(window.target_probs[:, :num_drafts], window.draft_probs, scale)
    mass = residual.sum(-1, keepdim=True)
    residual = (residual / mass).where(mass > 0, 0)
    is_judged = torch.arange(num_drafts) < window.num_valid.unsqueeze(-1)
    law = window.target_probs.clone()
    law[:, :num_drafts] = residual.where(is_judged.unsqueeze(-1), law[:, :num_drafts])
    return law


def emitted_law(tables: Tables, draws: Draws, rule: RuleLaw) -> Tensor:
    """[V**(K + 1)]: law of K + 1 tokens: what the window emits, then fresh ones of the target."""
    outputs, weights = [], []
    for num_kept in range(tables.num_drafts + 1):
        for token_id in range(tables.vocab_size):
            kept = draws.token_ids[:, :num_kept]
            outputs.append((kept, torch.full_like(draws.token_ids[:, :1], token_id)))
            weights.append(
                draws.weight * rule.stop[:, num_kept] * rule.final[:, num_kept, token_id]
            )
    law = torch.zeros_like(tables.joint())
    for (kept, last), weight in zip(outputs, weights, strict=True):
        add_extended(law, tables, torch.cat([kept, last], -1), weight)
    return law


def law_through_rule(
    tables: Tables, draws: Draws, rule: RuleLaw, verify: Verify, *, is_block: bool
) -> Tensor:
    """The same law, from calls of the rule: the pieces only say where its answer may change."""
    num_draws, num_drafts = draws.token_ids.shape
    bits = torch.cartesian_prod(*[torch.tensor([False, True])] * num_drafts).view(-1, num_drafts)
    row = torch.arange(num_draws).repeat_interleave(len(bits) * tables.vocab_size)
    is_under = bits.repeat_interleave(tables.vocab_size, 0).repeat(num_draws, 1)
    token_id = torch.arange(tables.vocab_size).repeat(num_draws * len(bits))

    coin = rule.coin[row]
    accept_uniforms = torch.where(is_under, coin / 2, (1 + coin) / 2)
    places = torch.arange(1, num_drafts + 1)
    last = (places * is_under).amax(-1)
    first = is_under.long().cumprod(-1).sum(-1)
    num_kept = last if is_block else first
    final = rule.final[row, num_kept]
    below = final.cumsum(-1).gather(-1, token_id.unsqueeze(-1)).squeeze(-1)
    size = final.gather(-1, token_id.unsqueeze(-1)).squeeze(-1)
    # Any other row's uniform, were it read, would give some other token.
    resample_uniforms = torch.full((len(row), num_drafts + 1), 0.5, dtype=torch.float64)
    resample_uniforms.scatter_(-1, num_kept.unsqueeze(-1), (below - size / 2).unsqueeze(-1))

    weight = draws.weight[row] * torch.where(is_under, coin, 1 - coin).prod(-1) * size
    is_possible = weight > 0
    picked = draws.rows(row[is_possible])
    result = verify(
        picked.token_ids,
        picked.draft_probs,
        picked.target_probs,
        accept_uniforms[is_possible],
        resample_uniforms[is_possible],
    )
    law = torch.zeros_like(tables.joint())
    for num_accepted in range(num_drafts + 1):
        is_this = result.num_accepted_tokens == num_accepted
        emitted = result.output_token_ids[is_this]
        assert (emitted[:, num_accepted + 1 :] == PLACEHOLDER_TOKEN_ID).all()
        add_extended(law, tables, emitted[:, : num_accepted + 1], weight[is_possible][is_this])
    return law


def add_extended(law: Tensor, tables: Tables, tokens: Tensor, weight: Tensor) -> None:
    """Adds `weight` [N] at the tokens [N, M], filled up to K + 1 by the target."""
    index = context_index(tokens, tables.vocab_size)
    part = torch.zeros(tables.vocab_size ** tokens.shape[1], dtype=torch.float64)
    part.index_add_(0, index, weight)
    for table in tables.target[tokens.shape[1] :]:
        part = (part.unsqueeze(-1) * table).flatten()
    law += part


def context_index(tokens: Tensor, vocab_size: int) -> Tensor:
    """[N, M] ids to [N], read as a number to base V."""
    index = torch.zeros(len(tokens), dtype=torch.int64)
    for column in tokens.unbind(-1):
        index = index * vocab_size + column.clamp(min=0)
    return index


def total_variation(law: Tensor, other: Tensor) -> float:
    return float((law - other).abs().sum() / 2)
