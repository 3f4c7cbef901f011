"""The n-gram hash of padded windows, against Python integers and against transformers."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from outrider.ops.ngram_hash import ngram_rows, ngram_rows_naive, setup

EOS = 3
VOCAB = 40


class Hash:
    """The constants of one layer's hash, and both ways to apply it."""

    def __init__(self, size: int, heads: int, base: int = 101, ple_index: int = 0) -> None:
        self.size = size
        self.sizes = setup.head_vocab_sizes(base, (size - 1) * heads, ple_index)
        self.offsets = setup.head_offsets(self.sizes)
        self.multipliers = setup.layer_multipliers(VOCAB, size, ple_index, seed=7)

    def rows(self, token_ids: Tensor, context_ids: Tensor) -> Tensor:
        constants = (self.multipliers, self.sizes, self.offsets)
        return ngram_rows(token_ids, context_ids, *map(torch.tensor, constants), EOS)

    def naive(self, token_ids: list[int]) -> list[list[int]]:
        constants = (self.multipliers, self.sizes, self.offsets)
        return ngram_rows_naive(token_ids, *map(list, constants), EOS)

    def no_context(self, num_requests: int) -> Tensor:
        return torch.full((num_requests, self.size - 1), EOS)


def random_ids(num_requests: int, length: int, eos_share: float) -> Tensor:
    ids = torch.randint(VOCAB, (num_requests, length))
    return ids.masked_fill(torch.rand(num_requests, length) < eos_share, EOS)


@pytest.mark.parametrize("eos_share", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("length", [1, 2, 5, 33])
@pytest.mark.parametrize(("size", "heads"), [(2, 3), (3, 1), (3, 8), (4, 2), (6, 2)])
def test_equals_python_integers(size: int, heads: int, length: int, eos_share: float) -> None:
    hashed = Hash(size, heads)
    ids = random_ids(4, length, eos_share)
    rows = hashed.rows(ids, hashed.no_context(4))
    assert rows.tolist() == [hashed.naive(one) for one in ids.tolist()]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_pattern_of_documents(size: int) -> None:
    """All ways to put an end-of-text into seven tokens."""
    hashed = Hash(size, 2)
    ids = torch.tensor(
        [
            [EOS if is_eos else 10 + t for t, is_eos in enumerate(pattern)]
            for pattern in itertools.product([False, True], repeat=7)
        ]
    )
    rows = hashed.rows(ids, hashed.no_context(len(ids)))
    assert rows.tolist() == [hashed.naive(one) for one in ids.tolist()]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_pieces_with_their_context_equal_the_whole(size: int) -> None:
    hashed = Hash(size, 2)
    ids = random_ids(3, 40, eos_share=0.2)
    whole = hashed.rows(ids, hashed.no_context(3))
    history = torch.cat([hashed.no_context(3), ids], dim=1)
    for cuts in ([1, 2, 3, 7, 8, 30, 40], list(range(1, 41)), [39, 40]):
        start = 0
        for end in cuts:
            context = history[:, start : start + size - 1]
            assert torch.equal(hashed.rows(ids[:, start:end], context), whole[:, start:end])
            start = end


@pytest.mark.parametrize(("size", "heads", "base"), [(2, 1, 101), (3, 4, 64), (4, 2, 53)])
@pytest.mark.parametrize("ple_index", [0, 1])
def test_equals_transformers(size: int, heads: int, base: int, ple_index: int) -> None:
    num_heads = (size - 1) * heads
    config = Qwen4ExpTextConfig(
        vocab_size=VOCAB, hidden_size=num_heads, ngram_size=size, heads_per_ngram=heads,
        ngram_vocab_size_base=base, make_ngram_vocab_size_divisible_by=8, seed=7,
        eos_token_id=EOS, num_hidden_layers=4, ple_layer_ids=[1, 2],
        layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    reference = Qwen4ExpTextNGramEmbedding(
        config, num_heads, layer_idx=0, ple_layer_index=ple_index
    )
    # One column a row, which holds the number of the row: what is looked up names its place.
    table = reference.ngram_embedding.weight
    with torch.no_grad():
        table.copy_(torch.arange(table.shape[0])[:, None])
    hashed = Hash(size, heads, base, ple_index)
    ids = random_ids(5, 50, eos_share=0.15)
    with torch.no_grad():
        expected = reference(ids, None)
    assert torch.equal(hashed.rows(ids, hashed.no_context(5)), expected.long())


def test_rows_lie_in_the_table_of_their_head() -> None:
    """Also with the largest ids and multipliers of a real vocabulary: no product overflows."""
    vocab, size = 248_320, 3
    sizes = setup.head_vocab_sizes(20_000_000, 4, 0)
    offsets = torch.tensor(setup.head_offsets(sizes))
    for seed in range(20):
        multipliers = setup.layer_multipliers(vocab, size, 0, seed)
        ids = torch.randint(vocab - 50, vocab, (2, 100))
        constants = torch.tensor(multipliers), torch.tensor(sizes), offsets
        rows = ngram_rows(ids, torch.full((2, 2), vocab - 1), *constants, vocab - 1)
        assert (rows >= offsets).all()
        assert (rows < offsets + torch.tensor(sizes)).all()


def test_the_token_itself_is_never_taken_as_an_end() -> None:
    """An end-of-text still sees its predecessors; the token after it sees none of them."""
    hashed = Hash(3, 2)
    rows = hashed.rows(torch.tensor([[10, 11, EOS, 12, 13]]), hashed.no_context(1))[0]
    other = hashed.rows(torch.tensor([[20, 21, EOS, 12, 13]]), hashed.no_context(1))[0]
    assert (rows[2] != other[2]).any()
    assert torch.equal(rows[3:], other[3:])
    # The bigram of the second token after the end sees the first; its trigram sees the end.
    assert not torch.equal(rows[3], rows[4])
