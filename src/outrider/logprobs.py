"""Log probabilities of tokens: as the sampler finds them, and as a user reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LogprobsOfPosition = dict[int, "Logprob"]
"""By token id, the token that was chosen first, then the likeliest in falling order."""


@dataclass(frozen=True)
class TokenLogprobs:
    """One position: a chosen token and the likeliest ones.

    Attributes:
        token_ids: the chosen one, then the likeliest, so that the chosen one may come twice.
        logprobs: of each of them; natural logarithms, -inf where a token could not be chosen.
        rank: of the chosen one, 1 the likeliest; of equals all have the best rank.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    rank: int


@dataclass(frozen=True)
class Logprob:
    """What is known of one token at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 is the likeliest.
        decoded_token: its text alone; U+FFFD where it holds part of a character.
    """

    logprob: float
    rank: int
    decoded_token: str
