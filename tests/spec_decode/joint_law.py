"""The joint law of consecutive tokens of a table, and a chi-square test of texts against it."""

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from outrider.sampling_params import SamplingParams
from tests.chi_square import chi_square_p_value
from tests.sampling.test_compute_probs import compute_probs_naive

LEAST_EXPECTED = 10
MARGINAL_LENGTH = 3


def conditional_laws(logits: Tensor, params: SamplingParams) -> Tensor:
    """[N, V] logits to [N, V] laws in float64, by the naive reading of the parameters."""
    rows = [
        compute_probs_naive(row, params.temperature, params.top_k, params.top_p, params.min_p)
        for row in logits.double().tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64)


@dataclass(frozen=True)
class JointLaw:
    """Law of texts of M tokens; a text is read as a number to base V.

    Attributes:
        codes: [C] int64, ascending: the texts that are possible.
        probs: [C] float64.
        vocab_size: V.
        num_tokens: M.
    """

    codes: Tensor
    probs: Tensor
    vocab_size: int
    num_tokens: int

    @classmethod
    def of_tables(
        cls, laws: Tensor, context: int, num_tokens: int, stop_token_id: int | None = None
    ) -> "JointLaw":
        """Enumerates all texts.

        Args:
            laws: [V * V, V], the law of a token after each pair of tokens.
            context: the pair before the first token.
            num_tokens: M.
            stop_token_id: ends a text; the rest of its M places repeats it.
        """
        vocab_size = laws.shape[1]
        codes, contexts = torch.zeros(1, dtype=torch.int64), torch.tensor([context])
        probs = torch.ones(1, dtype=torch.float64)
        token_ids = torch.arange(vocab_size)
        for place in range(num_tokens):
            rows = laws[contexts]
            if place and stop_token_id is not None:
                has_stopped = contexts % vocab_size == stop_token_id
                rows[has_stopped] = (token_ids == stop_token_id).double()
            joint = (probs.unsqueeze(-1) * rows).flatten()
            codes = (codes.unsqueeze(-1) * vocab_size + token_ids).flatten()[joint > 0]
            contexts = (contexts.unsqueeze(-1) * vocab_size + token_ids).flatten() % len(laws)
            contexts, probs = contexts[joint > 0], joint[joint > 0]
        return cls(codes, probs, vocab_size, num_tokens)

    def marginal(self, first: int, length: int) -> "JointLaw":
        """Law of the tokens `first` .. `first + length - 1`."""
        codes, index = self._part(self.codes, first, length).unique(return_inverse=True)
        probs = torch.zeros(len(codes), dtype=torch.float64).index_add_(0, index, self.probs)
        return JointLaw(codes, probs, self.vocab_size, length)

    def p_value(self, texts: Tensor) -> float:
        """Of [N, M] texts: the joint law, and that of each three consecutive tokens.

        The first sees whatever is wrong, the others, with few cells, see more of what is wrong
        between neighbours. The least of the p-values is multiplied by their number (Bonferroni).
        """
        codes = torch.zeros(len(texts), dtype=torch.int64)
        for column in texts.unbind(-1):
            codes = codes * self.vocab_size + column
        p_values = [self._p_value(codes)]
        for first in self._marginals():
            part = self._part(codes, first, MARGINAL_LENGTH)
            p_values.append(self.marginal(first, MARGINAL_LENGTH)._p_value(part))
        return min(1.0, len(p_values) * min(p_values))

    def power(self, other: "JointLaw", num_texts: int, least_p_value: float) -> float:
        """Probability that texts of another law get a p-value below `least_p_value`.

        Normal approximation of the noncentral chi-square, for the statistic that sees most.
        """
        firsts = self._marginals()
        level = least_p_value / (1 + len(firsts))
        pairs = [(self, other)]
        for first in firsts:
            part = self.marginal(first, MARGINAL_LENGTH), other.marginal(first, MARGINAL_LENGTH)
            pairs.append(part)
        return max(law._power(of, num_texts, level) for law, of in pairs)

    def pool(self, num_texts: int) -> Tensor:
        """[C] int64: the cell in which each text is counted.

        A text that is expected `LEAST_EXPECTED` times or more is a cell of its own. The others are
        laid end to end in the order of their codes, so that neighbours share a long prefix, and
        cut into cells at every multiple of twice as many: none expects less than `LEAST_EXPECTED`.
        What remains at the end goes into the last of them or, if there is none, into the first
        cell of the other kind.
        """
        expected = self.probs * num_texts
        is_rare = expected < LEAST_EXPECTED
        rare = expected.where(is_rare, 0)
        total, size = float(rare.sum()), 2 * LEAST_EXPECTED
        num_rare_cells = max(int(total // size), 1)
        cell = ((rare.cumsum(0) - rare) // size).long().clamp(max=num_rare_cells - 1)
        if total < LEAST_EXPECTED:
            cell += num_rare_cells
        return cell.where(is_rare, num_rare_cells - 1 + (~is_rare).cumsum(0))

    def pooled(self, weights: Tensor, num_texts: int) -> Tensor:
        """[C] to the sums over the cells of `pool`."""
        cell = self.pool(num_texts)
        return torch.zeros(int(cell.max()) + 1, dtype=torch.float64).index_add_(0, cell, weights)

    def _marginals(self) -> range:
        return range(self.num_tokens - MARGINAL_LENGTH + 1)

    def _power(self, other: "JointLaw", num_texts: int, level: float) -> float:
        assert torch.equal(self.codes, other.codes), "the laws allow the same texts"
        probs, others = self.pooled(self.probs, num_texts), self.pooled(other.probs, num_texts)
        is_cell = probs > 0
        shift = num_texts * float(((others - probs)[is_cell] ** 2 / probs[is_cell]).sum())
        freedom = int(is_cell.sum()) - 1
        critical = freedom - NormalDist().inv_cdf(level) * (2 * freedom) ** 0.5
        return 1 - NormalDist(freedom + shift, (2 * (freedom + 2 * shift)) ** 0.5).cdf(critical)

    def _p_value(self, codes: Tensor) -> float:
        place = torch.searchsorted(self.codes, codes).clamp(max=len(self.codes) - 1)
        if not torch.equal(self.codes[place], codes):
            return 0.0  # A text that the law excludes.
        counts = place.bincount(minlength=len(self.codes)).double()
        return chi_square_p_value(
            self.pooled(counts, len(codes)), self.pooled(self.probs, len(codes))
        )

    def _part(self, codes: Tensor, first: int, length: int) -> Tensor:
        """Codes of the tokens `first` .. `first + length - 1` of each text."""
        rest = self.num_tokens - first - length
        return codes // self.vocab_size**rest % self.vocab_size**length
