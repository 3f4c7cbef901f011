"""A grammar that is a table of states: a matcher without a library, for a handful of ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy import int32
from numpy.typing import NDArray

from outrider.grammar.grammar_path import GrammarPath

Edges = Mapping[int, Mapping[int, int]]
END = 3
# Ids 0 to 3 between the states 0 to 3. After a 1 comes a 2 and nothing else, and a text may end
# where it is in state 2; of no state may everything follow.
EDGES: Edges = {0: {0: 0, 1: 1, 2: 2}, 1: {2: 2}, 2: {0: 0, 1: 1, END: END}}


def allowed_ids(edges: Edges, token_ids: Sequence[int]) -> set[int] | None:
    """What may follow a text; None after its end, and after one that is none of the grammar."""
    state = 0
    for token_id in token_ids:
        if state == END or token_id not in edges[state]:
            return None
        state = edges[state][token_id]
    return None if state == END else set(edges[state])


def ids_of(mask: NDArray[int32] | None) -> set[int] | None:
    """The ids of a mask."""
    if mask is None:
        return None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@dataclass
class ToyMatcher:
    """The `Matcher` of a table; it remembers its states, and counts what it is asked."""

    edges: Edges = field(default_factory=lambda: EDGES)
    states: list[int] = field(default_factory=lambda: [0])
    num_bitmasks: int = 0

    def accept(self, token_id: int) -> bool:
        assert not self.is_terminated(), "nothing is accepted after the end"
        target = self.edges[self.states[-1]].get(token_id)
        if target is None:
            return False
        self.states.append(target)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens < len(self.states), "more than was accepted"
        del self.states[-num_tokens:]

    def bitmask(self) -> NDArray[int32] | None:
        assert not self.is_terminated(), "nothing follows the end"
        self.num_bitmasks += 1
        bits = sum(1 << token_id for token_id in self.edges[self.states[-1]])
        return np.array([bits], dtype=np.int32)

    def is_terminated(self) -> bool:
        return self.states[-1] == END


def toy_path(edges: Edges = EDGES) -> GrammarPath:
    return GrammarPath(ToyMatcher(edges))
